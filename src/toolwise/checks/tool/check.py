"""`check_tool`: tests whether a tool meets the contract that rollouts rely on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from toolwise.checks.tool.sample_arguments import minimal_arguments
from toolwise.checks.tool.tool_trial import ToolTrial
from toolwise.errors import ToolwiseError
from toolwise.tools.base import BaseTool
from toolwise.tools.function import check_tool_options
from toolwise.tools.schema import validate_arguments
from toolwise.untrusted.json_schema import compile_parameters

Verdict = Literal["ok", "warning", "wrong", "skipped"]
ReportFinding = Callable[[str, Verdict, str], None]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True)
class ToolCheck:
    """All findings about one tool."""

    tool: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"tool": self.tool, "ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}


@dataclass(frozen=True, slots=True)
class _FindingLog:
    findings: list[Finding] = field(default_factory=list)

    def report(self, name: str, verdict: Verdict, says: str) -> None:
        self.findings.append(Finding(name, verdict, " ".join(says.split())[:400]))


def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[dict[str, Any]] = (),
    create_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> ToolCheck:
    """Test a tool: schema, life cycle, valid, unusual and invalid arguments, concurrent instances and cancellation.

    `calls` are arguments to call it with; by default, minimal arguments are generated from the schema. `create_kwargs`
    are what a task would pass to `create`.
    """
    log = _FindingLog()
    if not _check_schema(tool, log.report):
        return ToolCheck(tool.name, tuple(log.findings))
    examples = list(calls) or [minimal_arguments(tool.tool_schema.function.parameters)]
    invalid = {
        json.dumps(call): problems for call in examples if (problems := validate_arguments(tool.tool_schema, call))
    }
    if invalid:
        call, problems = next(iter(invalid.items()))
        hint = "correct --call" if calls else "give an example with --call"
        log.report("calls", "wrong", f"{call} does not fit the schema: {'; '.join(problems)}; {hint}")
        return ToolCheck(tool.name, tuple(log.findings))
    trial = ToolTrial(tool, examples, dict(create_kwargs or {}), timeout_s)
    hint = "" if calls else "; the arguments were generated from the schema: give a working example with --call"
    asyncio.run(_run_trial(trial, log.report, hint))
    return ToolCheck(tool.name, tuple(log.findings))


def _check_schema(tool: BaseTool, report: ReportFinding) -> bool:
    """Check what needs no call; return False if the tool cannot be called."""
    function = tool.tool_schema.function
    if _NAME.fullmatch(function.name):
        report("name", "ok", function.name)
    else:
        report("name", "wrong", f"{function.name!r}: use 1 to 64 letters, digits, _ or -")
    says = function.description or "missing; models choose tools by their description"
    report("description", "ok" if function.description else "warning", says)
    try:
        check_tool_options({"family": tool.family, "price": tool.price}, "it")
        report("terms", "ok", f"family {tool.family}, price {tool.price:g}")
    except ToolwiseError as error:
        report("terms", "wrong", str(error))
    try:
        parameters = json.dumps(function.parameters, sort_keys=True)
        compile_parameters(function.name, parameters)
    except (ToolwiseError, TypeError, ValueError) as error:
        report("schema", "wrong", str(error))
        return False
    report("schema", *_check_parameters(function.parameters))
    return function.parameters.get("type") == "object"


def _check_parameters(parameters: dict[str, Any]) -> tuple[Verdict, str]:
    properties = parameters.get("properties") or {}
    if parameters.get("type") != "object":
        return "wrong", f"the parameters are of type {parameters.get('type')!r}; arguments are always an object"
    unknown = [name for name in parameters.get("required") or () if name not in properties]
    if unknown:
        return "wrong", f"required, but not in properties: {', '.join(unknown)}"
    missing = [
        name for name, schema in properties.items() if not isinstance(schema, dict) or not schema.get("description")
    ]
    if missing:
        return "warning", f"no description: {', '.join(missing)}"
    return "ok", f"{len(properties)} arguments, {len(parameters.get('required') or ())} required"


async def _run_trial(trial: ToolTrial, report: ReportFinding, hint: str) -> None:
    """Run the parts in order; if the life cycle or the results are wrong, skip the rest."""
    parts: tuple[tuple[str, Callable[[], Awaitable[tuple[Verdict, str]]]], ...] = (
        ("life cycle", trial.life_cycle),
        ("results", trial.results),
        ("equal calls", trial.equal_calls),
        ("instances", trial.instances),
        ("together", trial.concurrent_instances),
        ("odd arguments", trial.odd_arguments),
        ("bad arguments", trial.bad_arguments),
        ("cancelling", trial.cancellation),
    )
    broken = False
    async with trial.monitor_event_loop():
        for name, part in parts:
            if broken:
                report(name, "skipped", "not tried")
                continue
            try:
                verdict, says = await part()
            except Exception as fault:  # any exception from user code is a finding
                verdict, says = "wrong", f"{type(fault).__name__}: {str(fault)[:200]}{hint}"
            report(name, verdict, says)
            broken = name in ("life cycle", "results") and verdict == "wrong"
    report("event loop", *trial.loop_verdict())
    report("time", "ok", f"the slowest call took {trial.slowest_s:.3f} s of {trial.timeout_s:g} s")
