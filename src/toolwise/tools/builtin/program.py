"""What the `python` and `shell` tools share: a working folder for each rollout, and a fresh sandbox for each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from toolwise.errors import ConfigError, DataError
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema

if TYPE_CHECKING:
    from toolwise.sandbox.programs.run import Language, ProgramResult
    from toolwise.sandbox.programs.work_folders import WorkFolder

_NUMBERS = ("timeout_s", "memory_mb", "file_mb", "output_kb", "at_once")
_LISTS = ("read", "permissions")
NO_OUTPUT = "(no output)"


class ProgramTool(BaseTool):
    """Runs what the model wrote. Files in the working folder stay from call to call of a rollout; nothing else does.

    Configuration: `tier`, `require`, `permissions` (network, subprocess) and `read` as a sandbox has them; `timeout_s`
    (10), `memory_mb` (512), `file_mb` (64), `output_kb` (16; of stdout and of stderr the first and the last half of it
    are kept) and `at_once` (programs that run at a time). A task's `create_kwargs` may bring `files`: name -> text.
    """

    language: ClassVar[Language]
    parameter: ClassVar[str]
    config_keys: ClassVar[frozenset[str]] = frozenset({"tier", "require", *_NUMBERS, *_LISTS})

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        from toolwise.sandbox.faults import SandboxError
        from toolwise.sandbox.programs.program_sandbox import ProgramSandbox

        settings = _settings(config, f"tool {self.name}")
        try:
            self.sandbox = ProgramSandbox(self.language, **settings)
        except SandboxError as fault:
            raise ConfigError(f"tool {self.name}: {fault}") from None
        self._folders: dict[str, WorkFolder] = {}

    async def create(
        self, instance_id: str | None = None, files: Mapping[str, str] | None = None, **kwargs: Any
    ) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        if files is not None and not isinstance(files, Mapping):
            raise DataError(f"{self.name} create_kwargs: files must be an object of names and texts, got {files!r:.60}")
        self._folders[instance_id] = self.sandbox.open_folder(files)
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        text = parameters.get(self.parameter)
        if not isinstance(text, str):
            return f"error: {self.parameter} must be a string", None, {"ok": False}
        result = await self.sandbox.run(text, self._folders[instance_id])
        info = {"kind": result.kind, "exit_status": result.exit_status, "seconds": round(result.seconds, 3)}
        left = {"left_running": result.left_running} if result.left_running else {}
        return format_result(result), None, {"ok": result.kind == "ok", **info, **left}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        folder = self._folders.pop(instance_id, None)
        if folder is not None:
            await self.sandbox.close_folder(folder)


def format_result(result: ProgramResult) -> str:
    """What the model reads: what was printed, then what went wrong."""
    said = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    if result.kind != "ok":
        said.append(f"error: {result.message}")
    return "\n".join(said) or NO_OUTPUT


def _settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = {key: config[key] for key in sorted(ProgramTool.config_keys) if config.get(key) is not None}
    for key in _NUMBERS:
        value = given.get(key, 1)
        whole = isinstance(value, int) or (key == "timeout_s" and isinstance(value, float))
        if isinstance(value, bool) or not whole or not value > 0:
            raise ConfigError(f"{where}: {key} must be a number above 0, got {value!r}")
    for key in _LISTS:
        value = given.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where}: {key} must be a list of strings, got {value!r}")
    if not isinstance(given.get("require", False), bool) or not isinstance(given.get("tier", ""), str):
        raise ConfigError(f"{where}: tier must be a string, and require true or false")
    return given
