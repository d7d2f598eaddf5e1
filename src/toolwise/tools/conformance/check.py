"""`check_tool`: whether a tool keeps what rollouts rely on, tried out before a run trusts it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from toolwise.errors import ToolwiseError
from toolwise.parameters import compile_parameters
from toolwise.tools.base import BaseTool
from toolwise.tools.conformance.specimens import plain_arguments
from toolwise.tools.conformance.trial import Trial
from toolwise.tools.function import check_terms
from toolwise.tools.schema import validate_arguments

Verdict = Literal["ok", "warning", "wrong", "skipped"]
Tell = Callable[[str, Verdict, str], None]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True)
class ToolCheck:
    """All that was found about one tool."""

    tool: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"tool": self.tool, "ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}


@dataclass(frozen=True, slots=True)
class _Notes:
    findings: list[Finding] = field(default_factory=list)

    def tell(self, name: str, verdict: Verdict, says: str) -> None:
        self.findings.append(Finding(name, verdict, " ".join(says.split())[:400]))


def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[dict[str, Any]] = (),
    create_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> ToolCheck:
    """Tries `tool` out: its schema, its life cycle, good, odd and bad arguments, many at once, and a call called off.

    `calls` are arguments to call it with; without any, the plainest that fit the schema are made up. `create_kwargs`
    are what a task would give to `create`.
    """
    notes = _Notes()
    if not _check_schema(tool, notes.tell):
        return ToolCheck(tool.name, tuple(notes.findings))
    given = list(calls) or [plain_arguments(tool.tool_schema.function.parameters)]
    misfits = {json.dumps(call): problems for call in given if (problems := validate_arguments(tool.tool_schema, call))}
    if misfits:
        call, problems = next(iter(misfits.items()))
        hint = "correct --call" if calls else "give an example with --call"
        notes.tell("calls", "wrong", f"{call} does not fit the schema: {'; '.join(problems)}; {hint}")
        return ToolCheck(tool.name, tuple(notes.findings))
    trial = Trial(tool, given, dict(create_kwargs or {}), timeout_s)
    hint = "" if calls else "; the arguments were made up: give an example that works with --call"
    asyncio.run(_try_out(trial, notes.tell, hint))
    return ToolCheck(tool.name, tuple(notes.findings))


def _check_schema(tool: BaseTool, tell: Tell) -> bool:
    """What can be seen without calling it; False where calling makes no sense."""
    function = tool.tool_schema.function
    if _NAME.fullmatch(function.name):
        tell("name", "ok", function.name)
    else:
        tell("name", "wrong", f"{function.name!r}: use 1 to 64 letters, digits, _ or -")
    says = function.description or "there is none, and models choose by it"
    tell("description", "ok" if function.description else "warning", says)
    try:
        check_terms({"family": tool.family, "price": tool.price}, "it")
        tell("terms", "ok", f"family {tool.family}, price {tool.price:g}")
    except ToolwiseError as error:
        tell("terms", "wrong", str(error))
    try:
        parameters = json.dumps(function.parameters, sort_keys=True)
        compile_parameters(function.name, parameters)
    except (ToolwiseError, TypeError, ValueError) as error:
        tell("schema", "wrong", str(error))
        return False
    tell("schema", *_judge_parameters(function.parameters))
    return function.parameters.get("type") == "object"


def _judge_parameters(parameters: dict[str, Any]) -> tuple[Verdict, str]:
    properties = parameters.get("properties") or {}
    if parameters.get("type") != "object":
        return "wrong", f"the parameters are of type {parameters.get('type')!r}; arguments are always an object"
    unknown = [name for name in parameters.get("required") or () if name not in properties]
    if unknown:
        return "wrong", f"required, but no property: {', '.join(unknown)}"
    silent = [name for name, about in properties.items() if not isinstance(about, dict) or not about.get("description")]
    if silent:
        return "warning", f"no description: {', '.join(silent)}"
    return "ok", f"{len(properties)} arguments, {len(parameters.get('required') or ())} required"


async def _try_out(trial: Trial, tell: Tell, hint: str) -> None:
    """The parts of the trial, in order; where there is no life cycle there is nothing more to try."""
    parts: tuple[tuple[str, Callable[[], Awaitable[tuple[Verdict, str]]]], ...] = (
        ("life cycle", trial.life_cycle),
        ("results", trial.results),
        ("equal calls", trial.equal_calls),
        ("instances", trial.instances),
        ("together", trial.together),
        ("odd arguments", trial.odd_arguments),
        ("bad arguments", trial.bad_arguments),
        ("cancelling", trial.cancelling),
    )
    broken = False
    async with trial.watch_the_loop():
        for name, part in parts:
            if broken:
                tell(name, "skipped", "not tried")
                continue
            try:
                verdict, says = await part()
            except Exception as fault:  # whatever other people's code raises is a finding
                verdict, says = "wrong", f"{type(fault).__name__}: {str(fault)[:200]}{hint}"
            tell(name, verdict, says)
            broken = name in ("life cycle", "results") and verdict == "wrong"
    tell("event loop", *trial.loop_verdict())
    tell("time", "ok", f"the slowest call took {trial.slowest_s:.3f} s of {trial.timeout_s:g} s")
