"""A calculator tool: exact arithmetic on text, without `eval`.

A tokenizer feeds a Pratt parser that evaluates while it parses; every step is bounded in size.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from toolwise.errors import ToolwiseError
from toolwise.tools.base import BuiltinTool, ToolResult, one_argument_schema

Number = int | Fraction | float

MAX_LENGTH = 1_000
MAX_DEPTH = 100
MAX_DIGITS = 1_000
"""Of an integer, or of either side of a fraction; well below Python's limit for converting int to str."""
SIGNIFICANT_DIGITS = 12

_MAX_MAGNITUDE = 10**MAX_DIGITS
_MAX_BITS = _MAX_MAGNITUDE.bit_length()

_EXPONENT = r"(?:[eE][+-]?[0-9]+)?"
_PLAIN_NUMBER = rf"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+){_EXPONENT}"
_GROUPED_NUMBER = rf"[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+(?![0-9])(?:\.[0-9]*)?{_EXPONENT}"
_OTHER = r"(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<symbol>\*\*|//|[-+*/%^(),×÷−])|(?P<end>\Z)"
# Directly inside a call a comma separates arguments: max(1,234) has two. Elsewhere 1,234 is one number.
_TOKEN_IN_CALL = re.compile(rf"\s*(?:(?P<number>{_PLAIN_NUMBER})|{_OTHER})")
_TOKEN = re.compile(rf"\s*(?:(?P<number>{_GROUPED_NUMBER}|{_PLAIN_NUMBER})|{_OTHER})")
_SYMBOL_ALIASES = {"^": "**", "×": "*", "÷": "/", "−": "-"}


class CalculatorError(ToolwiseError):
    """An expression that cannot be evaluated; `position` is the 1-based index of the offending character."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(f"{problem} at position {position}")
        self.position = position


class _Token(NamedTuple):
    kind: str  # number, name, symbol or end
    text: str
    position: int


def evaluate(expression: str) -> Number:
    """The value of `expression`: an exact int or Fraction, or a float if it is irrational."""
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"the expression goes on past {MAX_LENGTH} characters", MAX_LENGTH + 1)
    tokens = _tokenize(expression)[::-1]  # a stack: the next token is the last
    value = _expression(tokens, 0, 0)
    if tokens[-1].kind != "end":
        raise _unexpected(tokens[-1])
    return value


def format_number(value: Number) -> str:
    """Integers in full, other numbers with 12 significant digits and no trailing zeros; far from 1 as 1.5e-20."""
    if isinstance(value, int):
        return str(value)
    context = Context(prec=SIGNIFICANT_DIGITS)
    decimal = context.divide(*map(Decimal, value.as_integer_ratio())).normalize(context)
    return format(decimal, "f" if -8 < decimal.adjusted() < SIGNIFICANT_DIGITS else "e") if decimal else "0"


def _tokenize(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    in_call = [False]  # for each open bracket, whether it is a call's
    position = 0
    while not tokens or tokens[-1].kind != "end":
        match = (_TOKEN_IN_CALL if in_call[-1] else _TOKEN).match(text, position)
        if match is None or match.lastgroup is None:
            start = len(text) - len(text[position:].lstrip())
            raise CalculatorError(f"unexpected {text[start]!a}", start + 1)
        token = match[match.lastgroup]
        if token == "(":
            in_call.append(bool(tokens) and tokens[-1].kind == "name")
        elif token == ")":
            in_call = in_call[:-1] or [False]
        plain = token.replace(",", "") if match.lastgroup == "number" else _SYMBOL_ALIASES.get(token, token.lower())
        tokens.append(_Token(match.lastgroup, plain, match.start(match.lastgroup) + 1))
        position = match.end()
    return tokens


def _divide(left: Number, right: Number) -> Number:
    return left / right if isinstance(left, float) else Fraction(left) / right


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, int) and not isinstance(base, float):
        exact = Fraction(base)
        # A lower bound on the size of the result, so that 9**9**9 is refused before it is computed.
        longest = max(exact.numerator.bit_length(), exact.denominator.bit_length())
        if (longest - 1) * abs(exponent) > _MAX_BITS:
            raise OverflowError
        return exact**exponent
    real_base, real_exponent = float(base), float(exponent)
    if real_base < 0 and not real_exponent.is_integer():
        raise ValueError("a negative number has no real power that is not whole")
    return math.pow(real_base, real_exponent) if real_base else 0.0**real_exponent


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ValueError("sqrt needs a number that is not negative")
    if not isinstance(value, float):
        exact = Fraction(value)
        root = Fraction(math.isqrt(exact.numerator), math.isqrt(exact.denominator))
        if root * root == exact:
            return root
    return math.sqrt(value)


def _round(value: Number, places: Number = 0) -> Number:
    """Round half away from zero, as taught in school: values are exact, so 2.675 to two places is 2.68."""
    if not isinstance(places, int) or abs(places) > MAX_DIGITS:
        raise ValueError("round needs a whole number of places")
    scale = Fraction(10) ** places
    size = math.floor(abs(Fraction(value)) * scale + Fraction(1, 2)) / scale
    return size if value >= 0 else -size


def _log(value: Number, base: Number | None = None) -> Number:
    if value <= 0 or (base is not None and base <= 0):
        raise ValueError("log needs a number above zero")
    return _natural_log(value) if base is None else _natural_log(value) / _natural_log(base)


def _natural_log(value: Number) -> float:
    if not isinstance(value, Fraction):
        return math.log(value)
    if Fraction(1, 2) < value < 2:  # the difference below would cancel here
        return math.log1p(value - 1)
    return math.log(value.numerator) - math.log(value.denominator)


_BINARY: dict[str, tuple[int, Callable[[Any, Any], Number]]] = {
    "+": (10, operator.add),
    "-": (10, operator.sub),
    "*": (20, operator.mul),
    "/": (20, _divide),
    "//": (20, operator.floordiv),
    "%": (20, operator.mod),
    "**": (40, _power),
}
_UNARY_PRECEDENCE = 30
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "sqrt": (_sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "min": (lambda *values: min(values), 1, MAX_LENGTH),
    "max": (lambda *values: max(values), 1, MAX_LENGTH),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "log": (_log, 1, 2),
    "exp": (math.exp, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
    "tan": (math.tan, 1, 1),
}


_PROBLEMS: dict[type[Exception], str] = {
    ZeroDivisionError: "division by zero",
    OverflowError: "the result is too large",
}


def _apply(function: Callable[..., Number], arguments: Sequence[Any], position: int) -> Number:
    """The result of `function`, with integral fractions as ints; errors and oversized results name `position`."""
    try:
        value = function(*arguments)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise CalculatorError(_PROBLEMS.get(type(error), str(error)), position) from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculatorError(_PROBLEMS[OverflowError], position)
        return value
    if max(abs(value.numerator), value.denominator) >= _MAX_MAGNITUDE:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits", position)
    return value.numerator if value.denominator == 1 else value


def _expression(tokens: list[_Token], min_precedence: int, depth: int) -> Number:
    """An operand, then operators while they bind more tightly than the caller's operator."""
    # Brackets, signs and powers can nest without limit, so they are counted; + and * nest at most twice in between.
    if depth > MAX_DEPTH:
        raise CalculatorError(f"nested more than {MAX_DEPTH} deep", tokens[-1].position)
    left = _operand(tokens, depth)
    while tokens[-1].text in _BINARY and _BINARY[tokens[-1].text][0] > min_precedence:
        symbol = tokens.pop()
        strength, operation = _BINARY[symbol.text]
        nesting = 1 if symbol.text == "**" else 0  # the only operator that binds to the right
        left = _apply(operation, (left, _expression(tokens, strength - nesting, depth + nesting)), symbol.position)
    return left


def _operand(tokens: list[_Token], depth: int) -> Number:
    token = tokens.pop()
    if token.kind == "number":
        exponent = token.text.lower().partition("e")[2]
        if exponent and abs(int(exponent)) > MAX_DIGITS:
            raise CalculatorError(f"the number has more than {MAX_DIGITS} digits", token.position)
        return _apply(Fraction, (token.text,), token.position)
    if token.kind == "name":
        return _CONSTANTS[token.text] if token.text in _CONSTANTS else _call(tokens, token, depth)
    if token.text == "(":
        value = _expression(tokens, 0, depth + 1)
        _close(tokens)
        return value
    if token.text in ("-", "+"):
        value = _expression(tokens, _UNARY_PRECEDENCE, depth + 1)
        return -value if token.text == "-" else value
    raise _unexpected(token)


def _call(tokens: list[_Token], name: _Token, depth: int) -> Number:
    if name.text not in _FUNCTIONS:
        raise CalculatorError(f"unknown name {name.text!r}", name.position)
    if tokens[-1].text != "(":
        raise CalculatorError(f"{name.text} needs its arguments in brackets", tokens[-1].position)
    arguments: list[Number] = []
    while not arguments or tokens[-1].text == ",":
        tokens.pop()
        arguments.append(_expression(tokens, 0, depth + 1))
    _close(tokens)
    function, min_arguments, max_arguments = _FUNCTIONS[name.text]
    if not min_arguments <= len(arguments) <= max_arguments:
        expected = f"{min_arguments}" if min_arguments == max_arguments else f"{min_arguments} or {max_arguments}"
        raise CalculatorError(f"{name.text} takes {expected} argument(s), got {len(arguments)}", name.position)
    return _apply(function, arguments, name.position)


def _close(tokens: list[_Token]) -> None:
    if tokens[-1].text != ")":
        raise CalculatorError("missing ')'", tokens[-1].position)
    tokens.pop()


def _unexpected(token: _Token) -> CalculatorError:
    problem = "the expression ends too early" if token.kind == "end" else f"unexpected {token.text!r}"
    return CalculatorError(problem, token.position)


class CalculatorTool(BuiltinTool):
    """Evaluates one expression per call. It is stateless, so instances are only ids."""

    family = "CALCULATE"
    config_keys: ClassVar[frozenset[str]] = frozenset()
    default_schema = one_argument_schema(
        "calculator",
        "Evaluates an arithmetic expression exactly. Operators + - * / // % ** and brackets; functions "
        "sqrt, abs, round, min, max, floor, ceil, log (natural), exp, sin, cos, tan; constants pi and e.",
        "expression",
        "The expression, for example (12 + 30) / 7.",
    )

    async def run(self, instance_id: str, text: str) -> ToolResult:
        try:
            return format_number(evaluate(text)), None, {"ok": True}
        except CalculatorError as error:
            return f"error: {error}", None, {"ok": False}
