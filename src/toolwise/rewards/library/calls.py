"""Rewards for tool calls: whether they fit their tools' JSON schemas, and whether they are the calls wanted."""

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
    """The share of the assistant's calls that fit their tools' schemas; `no_calls_score` where it made none.

    `tool_schemas`: tools as OpenAI's API takes them, or `{"name", "parameters"}` alone, as a list or as JSON text.
    """
    schemas = read_schemas(tool_schemas)
    calls = [
        call for message in as_messages(messages) if message.role == "assistant" for call in read_tool_calls(message)
    ]
    problems = [problem for call in calls if (problem := find_problem(call, schemas)) is not None]
    valid = len(calls) - len(problems)
    return EvaluateResult(
        score=valid / len(calls) if calls else no_calls_score,
        reason=problems[0] if problems else f"{valid} of {len(calls)} calls fit",
        metrics={"calls": MetricResult(score=len(calls)), "invalid_calls": MetricResult(score=len(problems))},
    )


def read_schemas(tool_schemas: Any) -> dict[str, str]:
    """Tool name -> the JSON schema of its arguments, as text."""
    given = tool_schemas
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as fault:
            raise ConfigError(f"tool_schemas: the text is not JSON ({fault}); give a list of tools") from fault
    if not isinstance(given, Sequence) or not given:
        raise ConfigError("tool_schemas is missing: give the tools' schemas as OpenAI's API takes them, as a list")
    schemas: dict[str, str] = {}
    for tool in given:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f'tool_schemas: {tool!r:.80} is no tool; write {{"name": …, "parameters": {{…}}}}')
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        schemas[function["name"]] = json.dumps(parameters, sort_keys=True)
    return schemas


def find_problem(call: ToolCall, schemas: Mapping[str, str]) -> str | None:
    """What is wrong with a call, in one line; None where nothing is."""
    if not isinstance(call.arguments, dict):
        return f"{call.name or 'a call'}: its arguments are no JSON object"
    if call.name not in schemas:
        return f"there is no tool {call.name!r:.80}"
    from referencing.exceptions import Unresolvable

    try:
        error = next(argument_errors(compile_parameters(call.name, schemas[call.name]), call.arguments), None)
    except ConfigError as fault:
        raise ConfigError(f"tool_schemas: {fault}") from fault
    except Unresolvable as fault:
        raise ConfigError(f"tool_schemas: {call.name!r} has a $ref that leads nowhere: {fault}") from fault
    except RecursionError:
        return f"{call.name}: its arguments are nested too deeply"
    except ValidationLimitError:
        return f"{call.name}: its arguments are too much to check"
    return None if error is None else f"{call.name}: {' '.join(error.message.split())[:200]}"


@reward_function
def call_match_reward(
    messages: list[Message],
    ground_truth: Any,
    ordered: bool = False,
    partial: bool = False,
    loose_strings: bool = False,
) -> EvaluateResult:
    """1 where the calls since the user last spoke are those of the ground truth, no more and no fewer.

    Calls are read from the messages, from tool blocks in the text, or from the answer as Python (`f(a=1)`). `partial`
    gives the share that fits. The forms of a ground truth: `call_syntax.expected_calls`.
    """
    wanted, made = expected_calls(ground_truth), actual_calls(messages)

    def matches(expected: ExpectedCall, call: ToolCall) -> bool:
        return expected.matches(call, loose_strings=loose_strings)

    matched = match_in_order(wanted, made, matches) if ordered else match_in_any_order(wanted, made, matches)
    most = max(len(wanted), len(made))
    share = matched / most if most else 1.0
    return EvaluateResult(
        score=share if partial else float(share == 1.0),
        reason=f"{matched} of {len(wanted)} wanted calls among {len(made)} made",
        metrics={"matched_share": MetricResult(score=share), "calls": MetricResult(score=len(made))},
    )


def actual_calls(messages: Sequence[Message]) -> list[ToolCall]:
    """The calls since the user last spoke; where there are none, the answer read as Python calls."""
    calls = [call for message in replies_to_user(messages) for call in read_tool_calls(message)]
    if calls or not replies_to_user(messages):
        return calls
    try:
        return parse_python_calls(final_answer(messages))
    except ValueError:  # prose: no calls were made
        return []


CallMatcher = Callable[[ExpectedCall, ToolCall], bool]


def match_in_order(wanted: Sequence[ExpectedCall], made: Sequence[ToolCall], matches: CallMatcher) -> int:
    """How many calls fit the wanted one at their own place."""
    return sum(matches(expected, call) for expected, call in zip(wanted, made, strict=False))


def match_in_any_order(wanted: Sequence[ExpectedCall], made: Sequence[ToolCall], matches: CallMatcher) -> int:
    """The most calls that can be paired with wanted ones.

    Greedy pairing would not do: a call may fit two wanted ones of which another call fits only the first.
    """
    choices = [[place for place, call in enumerate(made) if matches(expected, call)] for expected in wanted]
    taken: dict[int, int] = {}

    def pair(number: int, tried: set[int]) -> bool:
        for place in choices[number]:
            if place not in tried:
                tried.add(place)
                if place not in taken or pair(taken[place], tried):
                    taken[place] = number
                    return True
        return False

    return sum(pair(number, set()) for number in range(len(wanted)))
