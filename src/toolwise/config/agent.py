"""The `[agent]` section of a run's configuration. Source of docs/settings.md."""

from __future__ import annotations

from pydantic import Field, PositiveInt, model_validator

from toolwise.config.loader import Section


class AgentConfig(Section):
    """An agent of your own instead of our loop: it calls the model over the OpenAI API, and its calls are trained on.
    Needs pip install 'toolwise[serve]'. docs/own-agents.md."""

    run: str = ""
    """The agent: a function run(task, base_url, api_key), sync or async, as path/to/file.py:name or
    package.module:name. It may return its reward."""
    python: str = ""
    """Python interpreter of another environment in which `run` is loaded, such as .venv-mine/bin/python; empty: this
    one."""
    command: list[str] = Field(default_factory=list)
    """A command instead of `run`, started for each task, in any language: it reads the task as JSON from standard
    input, finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and may print its reward as its last line."""
    max_concurrent: PositiveInt = 16
    """Maximum number of tasks that the agent works on at once, each in a process."""
    max_calls: PositiveInt = 64
    """Maximum number of model calls per task; further ones are refused, and the rollout counts as cut short."""

    @property
    def enabled(self) -> bool:
        return bool(self.run or self.command)

    @model_validator(mode="after")
    def _check_one_given(self) -> AgentConfig:
        if self.run and self.command:
            raise ValueError("set run or command, not both")
        if self.python and not self.run:
            raise ValueError("python is the interpreter for run, which is not set")
        return self
