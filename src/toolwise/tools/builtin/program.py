"""The `python` and `shell` tools: a working folder per rollout, and a fresh sandbox per call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from toolwise.errors import ConfigError, DataError
from toolwise.tools.base import OpenAIFunctionToolSchema
from toolwise.tools.builtin import BuiltinTool, one_argument_schema
from toolwise.tools.function import ABOVE_0, checked_number

if TYPE_CHECKING:
    from toolwise.sandbox.programs.run import Language, ProgramResult
    from toolwise.sandbox.programs.work_folders import WorkFolder

_NUMBERS = ("timeout_s", "memory_mb", "file_mb", "output_kb", "at_once")
_LISTS = ("read", "permissions")
NO_OUTPUT = "(no output)"


class ProgramTool(BuiltinTool):
    """Runs a program written by the model. Within a rollout only files in the working folder persist between calls.

    Configuration: `tier`, `require`, `permissions` (network, subprocess) and `read` as for a sandbox; `timeout_s` (10),
    `memory_mb` (512), `file_mb` (64), `output_kb` (16; the first and the last half of it are kept of stdout and of
    stderr) and `at_once` (concurrent programs). A task's `create_kwargs` may contain `files`: name -> text.
    """

    language: ClassVar[Language]
    parameter: ClassVar[str]
    config_keys: ClassVar[frozenset[str]] = frozenset({"tier", "require", *_NUMBERS, *_LISTS})

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        from toolwise.sandbox.faults import SandboxError
        from toolwise.sandbox.programs.program_sandbox import ProgramSandbox

        settings = _settings(self.config, f"tool {self.name}")
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
            raise DataError(f"{self.name} create_kwargs: files must map names to texts, got {files!r:.60}")
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
        leftovers = {"left_running": result.left_running} if result.left_running else {}
        return format_result(result), None, {"ok": result.kind == "ok", **info, **leftovers}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        folder = self._folders.pop(instance_id, None)
        if folder is not None:
            await self.sandbox.close_folder(folder)


class PythonTool(ProgramTool):
    """Runs one program per call, in a fresh interpreter without network or subprocesses."""

    family = "CALCULATE"
    language: ClassVar[Language] = "python"
    parameter = "code"
    default_schema = one_argument_schema(
        "python",
        "Runs a Python program and gives back what it prints, with the value of a last expression. Each call is a "
        "fresh interpreter: files in the working folder stay between calls, variables do not. There is no network.",
        "code",
        "The program, for example print(2**10).",
    )


class ShellTool(ProgramTool):
    """Runs one command line per call. Processes it starts end with the call.

    It needs the tier `namespaced`, or explicitly `tier="standard"` with `permissions=["subprocess"]`.
    """

    language: ClassVar[Language] = "shell"
    parameter = "command"
    default_schema = one_argument_schema(
        "shell",
        "Runs a shell command and gives back what it prints. Files in the working folder stay between calls; "
        "variables, the current folder and background processes do not. There is no network.",
        "command",
        "The command, for example wc -l *.txt.",
    )


def format_result(result: ProgramResult) -> str:
    """Text for the model: the output, then the error."""
    parts = [stream.rstrip("\n") for stream in (result.stdout, result.stderr) if stream.strip()]
    if result.kind != "ok":
        parts.append(f"error: {result.message}")
    return "\n".join(parts) or NO_OUTPUT


def _settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings = {key: config[key] for key in sorted(ProgramTool.config_keys) if config.get(key) is not None}
    for key in _NUMBERS:
        whole, value = key != "timeout_s", settings.get(key, 1)
        checked_number(value, f"{where}: {key}", "a number above 0", whole=whole, low=ABOVE_0)
    for key in _LISTS:
        value = settings.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where}: {key} must be a list of strings, got {value!r}")
    if not isinstance(settings.get("require", False), bool) or not isinstance(settings.get("tier", ""), str):
        raise ConfigError(f"{where}: tier must be a string, and require true or false")
    return settings
