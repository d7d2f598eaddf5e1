"""The `python` and `shell` tools: a working folder per rollout, and a fresh sandbox per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from toolwise.errors import ConfigError, DataError
from toolwise.tools.base import BuiltinTool, OpenAIFunctionToolSchema, ToolResult, one_argument_schema
from toolwise.tools.function import PositiveNumber, checked

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

    async def run(self, instance_id: str, text: str) -> ToolResult:
        result = await self.sandbox.run(text, self._folders[instance_id])
        info = {"kind": result.kind, "exit_status": result.exit_status, "seconds": round(result.seconds, 3)}
        leftovers = {"left_running": result.left_running} if result.left_running else {}
        return format_result(result), None, {"ok": result.kind == "ok", **info, **leftovers}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        if (folder := self._folders.pop(instance_id, None)) is not None:
            await self.sandbox.close_folder(folder)


class PythonTool(ProgramTool):
    """Runs one program per call, in a fresh interpreter without network or subprocesses."""

    family = "CALCULATE"
    language: ClassVar[Language] = "python"
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
        kind = PositiveNumber if key == "timeout_s" else PositiveInt
        checked(settings.get(key, 1), kind, f"{where}: {key}", "a number above 0")
    for key in _LISTS:
        checked(settings.get(key, []), Sequence[str], f"{where}: {key}", "a list of strings")
    checked(settings.get("tier", ""), str, f"{where}: tier", "a string")
    checked(settings.get("require", False), bool, f"{where}: require", "true or false")
    return settings
