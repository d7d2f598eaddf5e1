"""Parses function calls in Python text and in ground truths, with `ast` and without running them. Used by `calls`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.errors import DataError
from toolwise.messages import ToolCall
from toolwise.serialization.json_text import load_json

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
    code = text.strip()
    fenced = _FENCE.match(code)
    code = (fenced[1] if fenced else code).strip()
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
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ToolCall(name=_dotted_name(node.func), arguments=arguments)


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    raise ValueError(f"{type(node).__name__} is not a function name")


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
    if len(item) != 1 or not isinstance(next(iter(item.values())), dict):
        raise error
    return _parse_possible_answers(*next(iter(item.items())))


def _parse_possible_answers(name: str, answers: dict[str, Any]) -> ExpectedCall:
    if not all(isinstance(values, list) and values for values in answers.values()):
        raise DataError(f"the ground truth's possible answers for {name!r} must be non-empty lists, one per parameter")
    return ExpectedCall(name, answers, frozenset(key for key, values in answers.items() if "" in values))
