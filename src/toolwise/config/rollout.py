"""The `[rollout]` section of a run's configuration. Source of docs/settings.md."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.imports import check_name
from toolwise.config.loader import Section

TOOL_PARSERS = (
    "auto", "hermes", "qwen", "qwen3_coder", "llama3", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm",
    "gpt_oss", "kimi_k2", "granite", "phi4", "gemma3", "functiongemma", "gemma4", "smollm3", "cohere", "lfm2", "olmo3",
    "minimax", "seed_oss", "nemotron", "hunyuan", "internlm", "muse_glimmer", "rlla", "action", "openai", "none",
)  # fmt: skip
ToolParserName = Annotated[str, AfterValidator(partial(check_name, names=TOOL_PARSERS))]


class VllmConfig(Section):
    """The server used by `rollout.engine = "vllm"`: docs/engine.md."""

    base_url: str = ""
    """URL of a running server, such as http://localhost:8000/v1; empty: start one and stop it when the run ends."""
    command: list[str] = Field(default_factory=lambda: ["vllm", "serve"], min_length=1)
    """Command that starts the server, with your own options; the model, the port and what training needs are added."""
    model: str = ""
    """Name of the model on the server; empty: the first one it lists."""
    api_key_env: str = ""
    """Environment variable that holds the server's API key, if it needs one."""
    weights_dir: Path | None = None
    """Folder for weight transfer: this process writes it, the server reads it; unset: a temporary folder."""
    start_s: PositiveFloat = 600.0
    """Time limit for the server to start, in seconds."""
    timeout_s: PositiveFloat = 600.0
    """Timeout of one request or of one step of a weight transfer, in seconds."""


class GrammarConfig(Section):
    """A grammar that every reply must follow; set at most one field. Needs pip install 'toolwise[grammar]'. Constrained
    samples differ from the model's own distribution, and training does not correct for that: docs/engine.md."""

    json_schema: Path | None = None
    """JSON schema file."""
    regex: str = ""
    """Regular expression."""
    lark: Path | None = None
    """Lark grammar file."""
    tool_calls: bool = False
    """Free text, but tool calls must name an existing tool and match its schema; for the parsers hermes and qwen."""

    @model_validator(mode="after")
    def _check_one_given(self) -> GrammarConfig:
        if sum(map(bool, (self.json_schema, self.regex, self.lark, self.tool_calls))) > 1:
            raise ValueError("set only one of json_schema, regex, lark and tool_calls")
        return self


class ChatConfig(Section):
    """How a conversation becomes tokens."""

    tool_parser: ToolParserName = "auto"
    """How tool calls are parsed from the model's text: "hermes", "qwen", "llama3", "mistral", "rlla", "action", another
    format of docs/tools.md, or a function or class as package.module:name or path/to/file.py:name. "auto" follows the
    chat template, or each text if the template is not recognized; "openai" leaves parsing to the server; "none" leaves
    the text as is (RLLA: no tools run)."""
    tool_prompt: Literal["auto", "template", "system"] = "auto"
    """Who describes the tools to the model: its chat template, or Toolwise in the system message, in the format that
    `tool_parser` reads. "auto" uses the template if it shows tools, and the system message if it ignores them."""
    on_template_change: Literal["append", "fork"] = "append"
    """When a chat template would render earlier turns differently (e.g. drop thoughts): "append" continues after the
    sampled tokens, one row per rollout; "fork" starts a new row as the template renders it."""


class RolloutConfig(ChatConfig):
    n: PositiveInt = 8
    """Rollouts per task: the group within which advantages are compared."""
    engine: Literal["toolwise", "transformers", "vllm"] = "toolwise"
    """What generates: "toolwise", the engine on the learner's weights; "transformers", batched forward passes of
    transformers, for any model; or "vllm", a vLLM server."""
    vllm: VllmConfig = VllmConfig()
    do_sample: bool = True
    """Sample tokens; false: decode greedily."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    max_new_tokens: PositiveInt = 256
    """Maximum tokens per turn."""
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default_factory=list, max_length=16)
    """Texts that end a turn as soon as the model has written one, such as "</answer>". It stays in the reply, token by
    token as sampled. docs/engine.md says what each engine does."""
    grammar: GrammarConfig = GrammarConfig()
    cache_mb: PositiveInt | None = None
    """Memory of the KV cache in MB; unset: on a GPU half of what is free when the run starts, but no more than updates
    leave (docs/memory.md), on a CPU up to 4 GiB."""
    max_batch: PositiveInt = 256
    """Maximum number of requests that generate together."""
    max_concurrent: PositiveInt | Literal["auto"] = 1024
    """Maximum number of concurrent episodes of a batch. "auto": of all batches together, by the measured share of their
    time in which they generate and by what the KV cache holds: docs/async.md."""
    max_concurrent_requests: PositiveInt | None = None
    """How many of them may wait for the model; unset: all."""
    max_concurrent_envs: PositiveInt | None = None
    """How many of them may be in the environment's `reset` or `step`; unset: all."""
    deadline_s: PositiveFloat = 600.0
    """Wall-clock limit of an episode in seconds, including tools and waiting."""
    max_episode_tokens: PositiveInt | None = None
    """Maximum tokens sampled per episode."""

    @model_validator(mode="after")
    def _check_grammar(self) -> RolloutConfig:
        if self.engine != "toolwise" and self.grammar != GrammarConfig():
            raise ValueError(f'grammar needs engine = "toolwise", got "{self.engine}"')
        return self

    @property
    def most_concurrent(self) -> int:
        """`max_concurrent`, where something else limits it."""
        return 1024 if self.max_concurrent == "auto" else self.max_concurrent
