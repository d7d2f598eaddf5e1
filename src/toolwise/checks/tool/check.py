"""`check_tool`: tests whether a tool meets the contract that rollouts rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.checks.contract import CheckReport, Outcome, run_parts
from toolwise.checks.example_values import example_value
from toolwise.checks.tool.tool_trial import ToolTrial
from toolwise.errors import ToolwiseError
from toolwise.tools.base import BaseTool, FunctionSchema
from toolwise.tools.function import check_tool_options
from toolwise.tools.schema import validate_arguments
from toolwise.types.findings import Finding
from toolwise.untrusted.json_schema import compile_parameters

MIN_BLOCK_S = 0.5
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[dict[str, Any]] = (),
    create_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> CheckReport:
    """Test a tool: schema, life cycle, valid, unusual and invalid arguments, concurrent instances and cancellation.

    `calls` are arguments to call it with; by default, minimal arguments are generated from the schema. `create_kwargs`
    are what a task would pass to `create`.
    """
    findings = _check_schema(tool)
    if findings[-1].verdict != "wrong":
        examples = list(calls) or [example_value(tool.tool_schema.function.parameters)]
        invalid = [(call, faults) for call in examples if (faults := validate_arguments(tool.tool_schema, call))]
        if invalid:
            call, faults = invalid[0]
            hint = "correct --call" if calls else "give an example with --call"
            says = f"{json.dumps(call)} does not fit the schema: {'; '.join(faults)}; {hint}"
            findings.append(Finding("calls", "wrong", says))
        else:
            hint = "" if calls else "; the arguments were generated from the schema: give a working example with --call"
            findings += _run_trial(ToolTrial(tool, examples, dict(create_kwargs or {}), timeout_s), hint)
    return CheckReport("tool", tool.name, tuple(findings))


def _check_schema(tool: BaseTool) -> list[Finding]:
    """Check what needs no call."""
    function = tool.tool_schema.function
    valid_name = _NAME.fullmatch(function.name) is not None
    name = function.name if valid_name else f"{function.name!r}: use 1 to 64 letters, digits, _ or -"
    description = function.description or "missing; models choose tools by their description"
    return [
        Finding("name", "ok" if valid_name else "wrong", name),
        Finding("description", "ok" if function.description else "warning", " ".join(description.split())[:400]),
        Finding("terms", *_check_terms(tool)),
        Finding("schema", *_check_parameters(function)),
    ]


def _check_terms(tool: BaseTool) -> Outcome:
    try:
        check_tool_options({"family": tool.family, "price": tool.price}, "it")
    except ToolwiseError as error:
        return "wrong", str(error)
    return "ok", f"family {tool.family}, price {tool.price:g}"


def _check_parameters(function: FunctionSchema) -> Outcome:
    parameters = function.parameters
    properties = parameters.get("properties") or {}
    try:
        compile_parameters(function.name, json.dumps(parameters, sort_keys=True))
    except (ToolwiseError, TypeError, ValueError) as error:
        return "wrong", str(error)
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


def _run_trial(trial: ToolTrial, hint: str) -> list[Finding]:
    findings = run_parts(
        {
            "life cycle": trial.life_cycle,
            "results": trial.results,
            "equal calls": trial.equal_calls,
            "instances": trial.instances,
            "together": trial.concurrent_instances,
            "odd arguments": trial.odd_arguments,
            "bad arguments": trial.bad_arguments,
            "cancelling": trial.cancellation,
        },
        essential={"life cycle", "results"},
        explain=lambda fault: f"{type(fault).__name__}: {str(fault)[:200]}{hint}",
        limit_s=trial.timeout_s,
        min_block_s=MIN_BLOCK_S,
        blocked="wrong",
    )
    time = f"the slowest call took {trial.slowest_s:.3f} s of {trial.timeout_s:g} s"
    return [*findings, Finding("time", "ok", time)]
