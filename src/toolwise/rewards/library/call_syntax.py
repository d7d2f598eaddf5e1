"""Function calls as Python text, and what ground truths say of calls: read with `ast`, never run. For `calls`."""

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

MAX_CHARS = 100_000
"""Longer texts are not parsed: nobody writes such calls, and Python's parser is slow to refuse them."""

_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A call that would be right: for each parameter the values that are accepted, and which may be left out."""

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
            any(same_value(given, value, loose_strings=loose_strings) for value in self.accepted[name])
            for name, given in arguments.items()
        )


def same_value(given: Any, wanted: Any, *, loose_strings: bool = False) -> bool:
    """Equality as JSON means it: 1 is 1.0 but not true, "1" is not 1.

    In loose strings only letters and digits count.
    """
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(
            same_value(given[key], wanted[key], loose_strings=loose_strings) for key in wanted
        )
    if isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        pairs = zip(given, wanted, strict=False)
        return len(given) == len(wanted) and all(same_value(g, w, loose_strings=loose_strings) for g, w in pairs)
    if loose_strings and isinstance(given, str) and isinstance(wanted, str):
        return _alphanumeric(given) == _alphanumeric(wanted)
    return bool(given == wanted)


def _alphanumeric(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def parse_python_calls(text: str) -> list[ToolCall]:
    """`f(a=1)`, `[f(a=1), g(b="x")]`, or one call a line; fenced as code or not. A ValueError where it is none of them.

    Arguments must be literals, given by name: which parameter a bare value is meant for, the text does not say.
    """
    code = text.strip()
    fenced = _FENCE.match(code)
    code = (fenced[1] if fenced else code).strip()
    if len(code) > MAX_CHARS:
        raise ValueError(f"{len(code)} characters are too many for calls")
    try:
        with warnings.catch_warnings():  # about escapes in model-written strings: nobody can act on them
            warnings.simplefilter("ignore")
            module = ast.parse(code)
        return [_call_from_ast(node) for statement in module.body for node in _call_nodes(statement)]
    except (SyntaxError, TypeError, RecursionError, MemoryError):  # TypeError: a literal such as {[]: 1}
        raise ValueError("it is not Python") from None


def _call_nodes(statement: ast.stmt) -> Sequence[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError(f"a statement ({type(statement).__name__}) is no call")
    value = statement.value
    return value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _call_from_ast(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{type(node).__name__} is no call")
    names = [keyword.arg for keyword in node.keywords]
    if node.args or None in names or len(set(names)) != len(names):
        raise ValueError("arguments must be given by name, each once")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ToolCall(name=_dotted_name(node.func), arguments=arguments)


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    raise ValueError(f"{type(node).__name__} is no name of a function")


def expected_calls(ground_truth: Any) -> list[ExpectedCall]:
    """The calls of a ground truth, in any of three forms (JSON text of the first two as well); [] wants no call.

    [{"name": "f", "arguments": {"a": 1}}]      as OpenAI and RLLA write calls (`parameters` too)
    [{"f": {"a": [1, "one"], "b": ["", 2]}}]    as BFCL writes possible answers; "" marks what may be left out
    "f(a=1)"                                    Python text
    """
    given = ground_truth
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return [_exact_call(call) for call in _parse_python_ground_truth(ground_truth)]
    given = [given] if isinstance(given, dict) else given
    if not isinstance(given, list):
        raise DataError(f"the ground truth {ground_truth!r:.80} holds no calls; give a list of calls or Python text")
    return [_parse_expected_call(item) for item in given]


def _parse_python_ground_truth(text: str) -> list[ToolCall]:
    try:
        return parse_python_calls(text)
    except ValueError as fault:
        raise DataError(f"the ground truth {text!r:.80} holds no calls: {fault}") from fault


def _exact_call(call: ToolCall) -> ExpectedCall:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    return ExpectedCall(call.name, {name: [value] for name, value in arguments.items()})


def _parse_expected_call(item: Any) -> ExpectedCall:
    wrong = DataError(f'the ground truth has {item!r:.80} for a call; write {{"name": …, "arguments": {{…}}}}')
    if not isinstance(item, dict):
        raise wrong
    if isinstance(item.get("function"), dict):
        item = item["function"]
    if isinstance(item.get("name"), str):
        arguments = item.get("arguments", item.get("parameters", {}))
        arguments = _load_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise wrong
        return _exact_call(ToolCall(name=item["name"], arguments=arguments))
    if len(item) != 1 or not isinstance(next(iter(item.values())), dict):
        raise wrong
    return _parse_possible_answers(*next(iter(item.items())))


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_possible_answers(name: str, answers: dict[str, Any]) -> ExpectedCall:
    if not all(isinstance(values, list) and values for values in answers.values()):
        raise DataError(f"the ground truth's possible answers for {name!r} must be lists, one a parameter")
    return ExpectedCall(name, answers, frozenset(key for key, values in answers.items() if "" in values))
