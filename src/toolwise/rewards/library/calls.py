"""Rewards for tool calls: whether they match their tools' JSON schemas, and whether they are the expected calls.

Calls in Python text and in ground truths are parsed with `ast`, without running them.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message, ToolCall, as_messages
from toolwise.rewards.function import reward_function
from toolwise.rewards.transcript import final_answer, read_tool_calls, replies_to_user
from toolwise.serialization.json_text import load_json
from toolwise.types import EvaluateResult, MetricResult
from toolwise.untrusted.json_schema import ValidationLimitError, argument_errors, compile_parameters

MAX_CHARS = 100_000
"""Longer texts are not parsed: they are not calls, and Python's parser is slow to reject them."""

_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A correct call: the accepted values of each parameter, and which parameters are optional."""

    name: str
    accepted: dict[str, list[Any]]
    optional: frozenset[str] = frozenset()

    def matches(self, call: ToolCall, *, loose_strings: bool = False) -> bool:
        arguments = call.arguments
        if call.name != self.name or not isinstance(arguments, dict) or not arguments.keys() <= self.accepted.keys():
            return False
        if not self.accepted.keys() - self.optional <= arguments.keys():
            return False
        return all(
            any(same_value(actual, value, loose_strings=loose_strings) for value in self.accepted[name])
            for name, actual in arguments.items()
        )


def same_value(actual: Any, expected: Any, *, loose_strings: bool = False) -> bool:
    """JSON equality: 1 equals 1.0 but not true, and "1" does not equal 1.

    With `loose_strings`, only letters and digits of strings are compared, ignoring case.
    """
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same_value(actual[key], expected[key], loose_strings=loose_strings) for key in expected
        )
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(actual, expected, strict=False)
        return len(actual) == len(expected) and all(same_value(a, e, loose_strings=loose_strings) for a, e in pairs)
    if loose_strings and isinstance(actual, str) and isinstance(expected, str):
        return _alphanumeric(actual) == _alphanumeric(expected)
    return bool(actual == expected)


def _alphanumeric(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def parse_python_calls(text: str) -> list[ToolCall]:
    """Parses `f(a=1)`, `[f(a=1), g(b="x")]`, or one call per line, optionally in a code fence; else raises ValueError.

    Arguments must be literals passed by name: the text does not say which parameter a positional value is for.
    """
    fenced = _FENCE.match(text.strip())
    code = (fenced[1] if fenced else text).strip()
    if len(code) > MAX_CHARS:
        raise ValueError(f"{len(code)} characters is too long for calls")
    try:
        with warnings.catch_warnings():  # invalid escapes in model-written strings; nothing to act on
            warnings.simplefilter("ignore")
            module = ast.parse(code)
        return [_call_from_ast(node) for statement in module.body for node in _call_nodes(statement)]
    except (SyntaxError, TypeError, RecursionError, MemoryError):  # TypeError: a literal such as {[]: 1}
        raise ValueError("not valid Python") from None


def _call_nodes(statement: ast.stmt) -> Sequence[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError(f"a statement ({type(statement).__name__}) is not a call")
    value = statement.value
    return value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _call_from_ast(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{type(node).__name__} is not a call")
    names = [keyword.arg for keyword in node.keywords]
    if node.args or None in names or len(set(names)) != len(names):
        raise ValueError("arguments must be passed by name, each once")
    if not all(isinstance(part, ast.Name | ast.Attribute | ast.expr_context) for part in ast.walk(node.func)):
        raise ValueError(f"{type(node.func).__name__} is not a function name")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ToolCall(name=ast.unparse(node.func), arguments=arguments)


def expected_calls(ground_truth: Any) -> list[ExpectedCall]:
    """The calls of a ground truth in any of three forms (the first two also as JSON text); [] expects no call.

    [{"name": "f", "arguments": {"a": 1}}]      OpenAI and RLLA form (also with `parameters`)
    [{"f": {"a": [1, "one"], "b": ["", 2]}}]    BFCL possible answers; "" marks an optional parameter
    "f(a=1)"                                    Python text
    """
    calls = ground_truth
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError):
            try:
                return [_exact_call(call) for call in parse_python_calls(ground_truth)]
            except ValueError as fault:
                raise DataError(f"the ground truth {ground_truth!r:.80} has no calls: {fault}") from fault
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise DataError(f"the ground truth {ground_truth!r:.80} has no calls; give a list of calls or Python text")
    return [_parse_expected_call(item) for item in calls]


def _exact_call(call: ToolCall) -> ExpectedCall:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    return ExpectedCall(call.name, {name: [value] for name, value in arguments.items()})


def _parse_expected_call(item: Any) -> ExpectedCall:
    error = DataError(f'the ground truth has {item!r:.80} as a call; write {{"name": …, "arguments": {{…}}}}')
    if not isinstance(item, dict):
        raise error
    if isinstance(item.get("function"), dict):
        item = item["function"]
    if isinstance(item.get("name"), str):
        arguments = item.get("arguments", item.get("parameters", {}))
        arguments = load_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise error
        return _exact_call(ToolCall(name=item["name"], arguments=arguments))
    if len(item) != 1 or not isinstance(answers := next(iter(item.values())), dict):
        raise error
    (name,) = item
    if not all(isinstance(values, list) and values for values in answers.values()):
        raise DataError(f"the ground truth's possible answers for {name!r} must be non-empty lists, one per parameter")
    return ExpectedCall(name, answers, frozenset(key for key, values in answers.items() if "" in values))


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
    `partial` returns the fraction that matches. See `expected_calls` for the forms of a ground truth.
    """
    expected, actual = expected_calls(ground_truth), actual_calls(messages)
    matches = functools.partial(ExpectedCall.matches, loose_strings=loose_strings)
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


def match_in_any_order(
    expected: Sequence[ExpectedCall], actual: Sequence[ToolCall], matches: Callable[[ExpectedCall, ToolCall], bool]
) -> int:
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
