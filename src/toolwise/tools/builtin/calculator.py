"""A calculator tool: exact arithmetic on text, without `eval`.

A tokenizer feeds a Pratt parser that evaluates while it parses; every step is bounded in size.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

from toolwise.errors import ToolwiseError
from toolwise.tools.builtin import BuiltinTool, one_argument_schema

Number = int | Fraction | float

MAX_LENGTH = 1_000
MAX_DEPTH = 100
MAX_DIGITS = 1_000
"""Of an integer, or of either side of a fraction; well below Python's limit for converting int to str."""
SIGNIFICANT_DIGITS = 12

_MAX_MAGNITUDE = 10**MAX_DIGITS
_MAX_BITS = _MAX_MAGNITUDE.bit_length()

_EXPONENT = r"(?:[eE][+-]?[0-9]+)?"
_PLAIN_NUMBER = re.compile(rf"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+){_EXPONENT}")
_GROUPED_NUMBER = re.compile(rf"[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+(?![0-9])(?:\.[0-9]*)?{_EXPONENT}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SYMBOL = re.compile(r"\*\*|//|[-+*/%^(),×÷−]")
_SYMBOL_ALIASES = {"^": "**", "×": "*", "÷": "/", "−": "-"}


class CalculatorError(ToolwiseError):
    """An expression that cannot be evaluated; `position` is the 1-based index of the offending character."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(f"{problem} at position {position}")
        self.position = position


class _Token(NamedTuple):
    kind: Literal["number", "name", "symbol", "end"]
    text: str
    position: int


def evaluate(expression: str) -> Number:
    """The value of `expression`: an exact int or Fraction, or a float if it is irrational."""
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"the expression goes on past {MAX_LENGTH} characters", MAX_LENGTH + 1)
    return _Parser(_tokenize(expression)).parse()


def format_number(value: Number) -> str:
    """Integers in full, other numbers with 12 significant digits and no trailing zeros; far from 1 as 1.5e-20."""
    if isinstance(value, int):
        return str(value)
    context = Context(prec=SIGNIFICANT_DIGITS)
    if isinstance(value, Fraction):
        decimal = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    else:
        decimal = context.create_decimal(value)
    if not decimal:
        return "0"
    decimal = decimal.normalize(context)
    return format(decimal, "f" if -8 < decimal.adjusted() < SIGNIFICANT_DIGITS else "e")


def _tokenize(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    in_call: list[bool] = []
    index = 0
    while index < len(text):
        if text[index].isspace():
            index += 1
            continue
        # Directly inside a call a comma separates arguments: max(1,234) has two. Elsewhere 1,234 is one number.
        grouped = None if in_call and in_call[-1] else _GROUPED_NUMBER.match(text, index)
        if match := grouped or _PLAIN_NUMBER.match(text, index):
            tokens.append(_Token("number", match[0].replace(",", ""), index + 1))
        elif match := _NAME.match(text, index):
            tokens.append(_Token("name", match[0].lower(), index + 1))
        elif match := _SYMBOL.match(text, index):
            symbol = _SYMBOL_ALIASES.get(match[0], match[0])
            if symbol == "(":
                in_call.append(bool(tokens) and tokens[-1].kind == "name")
            elif symbol == ")" and in_call:
                in_call.pop()
            tokens.append(_Token("symbol", symbol, index + 1))
        else:
            raise CalculatorError(f"unexpected {text[index]!a}", index + 1)
        index = match.end()
    tokens.append(_Token("end", "", len(text) + 1))
    return tokens


def _literal(token: _Token) -> Number:
    exponent = token.text.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > MAX_DIGITS:
        raise CalculatorError(f"the number has more than {MAX_DIGITS} digits", token.position)
    return _apply(Fraction, (token.text,), token.position)


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    return Fraction(left, right)


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


def _apply(function: Callable[..., Number], arguments: tuple[Any, ...], position: int) -> Number:
    """The result of `function`, with integral fractions as ints; errors and oversized results name `position`."""
    try:
        value = function(*arguments)
    except ZeroDivisionError:
        raise CalculatorError("division by zero", position) from None
    except OverflowError:
        raise CalculatorError("the result is too large", position) from None
    except ValueError as error:
        raise CalculatorError(str(error), position) from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculatorError("the result is too large", position)
        return value
    if max(abs(value.numerator), value.denominator) >= _MAX_MAGNITUDE:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits", position)
    return value.numerator if value.denominator == 1 else value


class _Parser:
    """A Pratt parser: an operand, then operators while they bind more tightly than the caller's operator."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def parse(self) -> Number:
        value = self._expression(0, 0)
        if self._peek.kind != "end":
            raise self._unexpected(self._peek)
        return value

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _unexpected(self, token: _Token) -> CalculatorError:
        if token.kind == "end":
            return CalculatorError("the expression ends too early", token.position)
        return CalculatorError(f"unexpected {token.text!r}", token.position)

    def _expression(self, min_precedence: int, depth: int) -> Number:
        # Brackets, signs and powers can nest without limit, so they are counted; + and * nest at most twice in between.
        if depth > MAX_DEPTH:
            raise CalculatorError(f"nested more than {MAX_DEPTH} deep", self._peek.position)
        left = self._operand(depth)
        while (token := self._peek).kind == "symbol" and token.text in _BINARY:
            strength, operation = _BINARY[token.text]
            if strength <= min_precedence:
                break
            self._take()
            if token.text == "**":
                right = self._expression(strength - 1, depth + 1)
            else:
                right = self._expression(strength, depth)
            left = _apply(operation, (left, right), token.position)
        return left

    def _operand(self, depth: int) -> Number:
        token = self._take()
        if token.kind == "number":
            return _literal(token)
        if token.kind == "name":
            return self._constant_or_call(token, depth)
        if token.text == "(":
            value = self._expression(0, depth + 1)
            self._close()
            return value
        if token.text in ("-", "+"):
            value = self._expression(_UNARY_PRECEDENCE, depth + 1)
            return -value if token.text == "-" else value
        raise self._unexpected(token)

    def _constant_or_call(self, token: _Token, depth: int) -> Number:
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        if token.text not in _FUNCTIONS:
            raise CalculatorError(f"unknown name {token.text!r}", token.position)
        if self._peek.text != "(":
            raise CalculatorError(f"{token.text} needs its arguments in brackets", self._peek.position)
        self._take()
        arguments = [self._expression(0, depth + 1)]
        while self._peek.text == ",":
            self._take()
            arguments.append(self._expression(0, depth + 1))
        self._close()
        function, min_arguments, max_arguments = _FUNCTIONS[token.text]
        if not min_arguments <= len(arguments) <= max_arguments:
            expected = f"{min_arguments}" if min_arguments == max_arguments else f"{min_arguments} or {max_arguments}"
            problem = f"{token.text} takes {expected} argument(s), got {len(arguments)}"
            raise CalculatorError(problem, token.position)
        return _apply(function, tuple(arguments), token.position)

    def _close(self) -> None:
        token = self._take()
        if token.text != ")":
            raise CalculatorError("missing ')'", token.position)


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

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return await super().create(instance_id, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        expression = parameters.get("expression")
        if not isinstance(expression, str):
            return "error: expression must be a string", None, {"ok": False}
        try:
            return format_number(evaluate(expression)), None, {"ok": True}
        except CalculatorError as error:
            return f"error: {error}", None, {"ok": False}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None
