"""Rewards for tool calls: whether they match their tools' JSON schemas, and whether they are the expected calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall, as_messages
from toolwise.rewards.function import reward_function
from toolwise.rewards.library.call_syntax import ExpectedCall, expected_calls, parse_python_calls
from toolwise.rewards.transcript import final_answer, read_tool_calls, replies_to_user
from toolwise.types import EvaluateResult, MetricResult
from toolwise.untrusted.json_schema import ValidationLimitError, argument_errors, compile_parameters


@reward_function
def schema_reward(
    messages: list[Message], ground_truth: Any, tool_schemas: Any = None, no_calls_score: float = 1.0
) -> EvaluateResult:
    """The fraction of the assistant's calls that match their tools' schemas; `no_calls_score` if it made none.

    `tool_schemas`: tools in OpenAI's API format, or just `{"name", "parameters"}`, as a list or as JSON text.
    """
    schemas = read_schemas(tool_schemas)
    calls = [
        call for message in as_messages(messages) if message.role == "assistant" for call in read_tool_calls(message)
    ]
    problems = [problem for call in calls if (problem := find_problem(call, schemas)) is not None]
    valid = len(calls) - len(problems)
    return EvaluateResult(
        score=valid / len(calls) if calls else no_calls_score,
        reason=problems[0] if problems else f"{valid} of {len(calls)} calls are valid",
        metrics={"calls": MetricResult(score=len(calls)), "invalid_calls": MetricResult(score=len(problems))},
    )


def read_schemas(tool_schemas: Any) -> dict[str, str]:
    """Maps each tool name to the JSON schema of its arguments, as text."""
    tools = tool_schemas
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as fault:
            raise ConfigError(f"tool_schemas: the text is not JSON ({fault}); give a list of tools") from fault
    if not isinstance(tools, Sequence) or not tools:
        raise ConfigError("tool_schemas is missing: give a list of tool schemas in OpenAI's API format")
    schemas: dict[str, str] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f'tool_schemas: {tool!r:.80} is not a tool; write {{"name": …, "parameters": {{…}}}}')
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        schemas[function["name"]] = json.dumps(parameters, sort_keys=True)
    return schemas


def find_problem(call: ToolCall, schemas: Mapping[str, str]) -> str | None:
    """One line about what is wrong with a call, or None."""
    if not isinstance(call.arguments, dict):
        return f"{call.name or 'a call'}: its arguments are not a JSON object"
    if call.name not in schemas:
        return f"there is no tool {call.name!r:.80}"
    try:
        validator = compile_parameters(call.name, schemas[call.name])
        error = next(argument_errors(call.name, validator, call.arguments), None)
    except ConfigError as fault:
        raise ConfigError(f"tool_schemas: {fault}") from fault
    except ValidationLimitError as limit:
        return f"{call.name}: its arguments are {limit}"
    return None if error is None else f"{call.name}: {' '.join(error.message.split())[:200]}"


@reward_function
def call_match_reward(
    messages: list[Message],
    ground_truth: Any,
    ordered: bool = False,
    partial: bool = False,
    loose_strings: bool = False,
) -> EvaluateResult:
    """1 if the calls since the last user message are exactly those of the ground truth, else 0.

    Calls are read from the messages, from tool_call blocks in the text, or from the answer as Python (`f(a=1)`).
    `partial` returns the fraction that matches. See `call_syntax.expected_calls` for the forms of a ground truth.
    """
    expected, actual = expected_calls(ground_truth), actual_calls(messages)

    def matches(pattern: ExpectedCall, call: ToolCall) -> bool:
        return pattern.matches(call, loose_strings=loose_strings)

    pairs = zip(expected, actual, strict=False)
    matched = sum(matches(*pair) for pair in pairs) if ordered else match_in_any_order(expected, actual, matches)
    total = max(len(expected), len(actual))
    share = matched / total if total else 1.0
    return EvaluateResult(
        score=share if partial else float(share == 1.0),
        reason=f"{matched} of {len(expected)} expected calls matched; {len(actual)} made",
        metrics={"matched_share": MetricResult(score=share), "calls": MetricResult(score=len(actual))},
    )


def actual_calls(messages: Sequence[Message]) -> list[ToolCall]:
    """The calls since the last user message; if there are none, the answer parsed as Python calls."""
    calls = [call for message in replies_to_user(messages) for call in read_tool_calls(message)]
    if calls or not replies_to_user(messages):
        return calls
    try:
        return parse_python_calls(final_answer(messages))
    except ValueError:  # prose, so no calls
        return []


CallMatcher = Callable[[ExpectedCall, ToolCall], bool]


def match_in_any_order(expected: Sequence[ExpectedCall], actual: Sequence[ToolCall], matches: CallMatcher) -> int:
    """The size of a maximum matching between calls and expected calls.

    Greedy pairing falls short: a call may match two expected calls while another matches only the first of them.
    """
    choices = [[index for index, call in enumerate(actual) if matches(pattern, call)] for pattern in expected]
    matched: dict[int, int] = {}

    def pair(row: int, visited: set[int]) -> bool:
        for index in choices[row]:
            if index not in visited:
                visited.add(index)
                if index not in matched or pair(matched[index], visited):
                    matched[index] = row
                    return True
        return False

    return sum(pair(row, set()) for row in range(len(expected)))
