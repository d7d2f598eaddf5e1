"""The calculator: hand-worked tables, Python's own arithmetic on random trees, and bounds on hostile text."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import time
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ToolwiseError
from toolwise.tools.builtin.calculator import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_LENGTH,
    CalculatorError,
    CalculatorTool,
    evaluate,
    format_number,
)


@pytest.mark.parametrize(
    ("expression", "printed"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("10 - 4 - 3", "3"),
        ("100 / 10 / 5", "2"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("1 / 3", "0.333333333333"),
        ("2 / 3", "0.666666666667"),
        ("0.1 + 0.2", "0.3"),
        ("1.10 * 3", "3.3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2 ** 10", "1024"),
        ("2 ^ 10", "1024"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("(-2) ** 2", "4"),
        ("2 ** -1", "0.5"),
        ("2 ** -3 * 4", "0.5"),
        ("--3", "3"),
        ("2 - -3", "5"),
        ("+5", "5"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("1,234 * 2", "2468"),
        ("1,234,567.5 + 0.5", "1234568"),
        ("max(1,234)", "234"),
        ("max((1,234), 5)", "1234"),
        (".5 + 3.", "3.5"),
        ("1.5e3", "1500"),
        ("2e-2", "0.02"),
        ("0 ** 0", "1"),
        ("-0.0", "0"),
        ("123456789 * 987654321", "121932631112635269"),
        ("100000 / 3 * 3", "100000"),
    ],
)
def test_arithmetic_by_hand(expression: str, printed: str) -> None:
    assert format_number(evaluate(expression)) == printed


@pytest.mark.parametrize(
    ("expression", "printed"),
    [
        ("sqrt(144)", "12"),
        ("sqrt(2.25)", "1.5"),
        ("sqrt(2)", "1.41421356237"),
        ("abs(-3.5)", "3.5"),
        ("round(2.5)", "3"),
        ("round(-2.5)", "-3"),
        ("round(2.675, 2)", "2.68"),
        ("round(1234, -2)", "1200"),
        ("round(pi, 2)", "3.14"),
        ("min(3, 1, 2)", "1"),
        ("max(1/3, 0.3)", "0.333333333333"),
        ("floor(-1.5)", "-2"),
        ("ceil(1.2)", "2"),
        ("log(e)", "1"),
        ("log(8, 2)", "3"),
        ("log(1.000001)", "0.0000009999995"),
        ("exp(0)", "1"),
        ("sin(0) + cos(0) + tan(0)", "1"),
        ("PI", "3.14159265359"),
        ("SQRT(4)", "2"),
        ("4 ** 0.5", "2"),
    ],
)
def test_functions_by_hand(expression: str, printed: str) -> None:
    assert format_number(evaluate(expression)) == printed


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("2 + 3", int),
        ("6 / 3", int),
        ("0.5 + 0.5", int),
        ("1 / 3", Fraction),
        ("0.1", Fraction),
        ("sqrt(2)", float),
    ],
)
def test_values_stay_exact_where_they_can(expression: str, kind: type) -> None:
    assert type(evaluate(expression)) is kind


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "the expression ends too early at position 1"),
        ("1 +", "the expression ends too early at position 4"),
        ("1 / 0", "division by zero at position 3"),
        ("5 % (2 - 2)", "division by zero at position 3"),
        ("1 // 0", "division by zero at position 3"),
        ("0 ** -1", "division by zero at position 3"),
        ("(1 + 2", "missing ')' at position 7"),
        ("1 + 2)", "unexpected ')' at position 6"),
        ("2 3", "unexpected '3' at position 3"),
        ("1,23 + 1", "unexpected ',' at position 2"),
        ("1,2345", "unexpected ',' at position 2"),
        ("1 + foo", "unknown name 'foo' at position 5"),
        ("2 $ 3", "unexpected '$' at position 3"),
        ("1\n+\n@", "unexpected '@' at position 5"),
        ("sqrt(-1)", "sqrt needs a number that is not negative at position 1"),
        ("log(0)", "log needs a number above zero at position 1"),
        ("sqrt(1, 2)", "sqrt takes 1 argument(s), got 2 at position 1"),
        ("sqrt 4", "sqrt needs its arguments in brackets at position 6"),
        ("(-8) ** (1/3)", "a negative number has no real power that is not whole at position 6"),
        ("round(1, 0.5)", "round needs a whole number of places at position 1"),
        ("9**9**9", "the result is too large at position 2"),
        ("exp(1000)", "the result is too large at position 1"),
        ("1e5000", "the number has more than 1000 digits at position 1"),
        ("10**999 * 10", "the result has more than 1000 digits at position 9"),
    ],
)
def test_errors_say_what_and_where(expression: str, message: str) -> None:
    with pytest.raises(CalculatorError) as caught:
        evaluate(expression)
    assert str(caught.value) == message
    assert isinstance(caught.value, ToolwiseError)


def test_length_is_bounded() -> None:
    assert evaluate("1" + "+1" * ((MAX_LENGTH - 1) // 2)) == MAX_LENGTH // 2
    with pytest.raises(CalculatorError, match="past 1000 characters at position 1001"):
        evaluate("1" * (MAX_LENGTH + 1))


@pytest.mark.parametrize(("before", "after"), [("(", ")"), ("-", ""), ("1**", ""), ("abs(", ")")])
def test_depth_is_bounded(before: str, after: str) -> None:
    fits, too_deep = MAX_DEPTH, MAX_DEPTH + 1
    assert evaluate(before * fits + "0" + after * fits) in (0, 1)
    with pytest.raises(CalculatorError, match="nested more than 100 deep at position"):
        evaluate(before * too_deep + "0" + after * too_deep)


def test_the_deepest_mixed_nesting_needs_no_deep_stack() -> None:
    assert evaluate("1+2*(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == sum(2**i for i in range(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9**9**9**9**9",
        "(9**9)**(9**9)",
        "2**(10**999)",
        "(1/9**900)**(10**900)",
        "1e999**1e999",
        "0.5**1e300",
        "round(1/3, 10**999)",
        "+".join(f"1/{n}" for n in range(1, 200)),
        "*".join(["9**104"] * 120),
        "%".join(["9**1000"] * 120),
        "(1/3)" + "**2" * 90,
        "1" + "0" * 999,
    ],
)
def test_hostile_expressions_end_at_once(expression: str) -> None:
    began = time.process_time()
    with contextlib.suppress(CalculatorError):
        assert len(format_number(evaluate(expression))) <= MAX_DIGITS + 10
    assert time.process_time() - began < 0.5


def test_powers_of_one_and_zero_are_not_refused_for_size() -> None:
    assert evaluate("1 ** (10 ** 900)") == 1
    assert evaluate("(-1) ** (10 ** 900 + 1)") == -1
    assert evaluate("0 ** (10 ** 900)") == 0


@dataclass(frozen=True)
class Tree:
    """An expression as text, with its value in Python (None: division by zero)."""

    text: str
    value: Fraction | None


BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": lambda a, b: Fraction(a // b),
    "%": operator.mod,
}


def joined(left: Tree, symbol: str, right: Tree, spaces: str) -> Tree:
    text = f"({left.text}){spaces}{symbol}{spaces}({right.text})"
    if left.value is None or right.value is None or (symbol in ("/", "//", "%") and right.value == 0):
        return Tree(text, None)
    return Tree(text, BINARY[symbol](left.value, right.value))


def powered(base: Tree, exponent: int) -> Tree:
    text = f"({base.text}) ** {exponent}"
    if base.value is None or (base.value == 0 and exponent < 0):
        return Tree(text, None)
    return Tree(text, base.value**exponent)


def negated(inner: Tree) -> Tree:
    return Tree(f"-({inner.text})", None if inner.value is None else -inner.value)


LEAVES = st.one_of(
    st.integers(0, 9999).map(lambda n: Tree(str(n), Fraction(n))),
    st.integers(0, 10**7).map(lambda n: Tree(f"{n:,}", Fraction(n))),
    st.decimals(0, 1000, places=3).map(lambda d: Tree(format(d, "f"), Fraction(d))),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(joined, inner, st.sampled_from(sorted(BINARY)), inner, st.sampled_from(["", " "])),
        st.builds(powered, inner, st.integers(-3, 3)),
        st.builds(negated, inner),
    ),
    max_leaves=12,
)


@given(TREES)
@settings(deadline=None)
def test_agrees_with_python_on_random_trees(tree: Tree) -> None:
    if len(tree.text) > MAX_LENGTH:
        return
    if tree.value is None:
        with pytest.raises(CalculatorError, match="division by zero at position"):
            evaluate(tree.text)
        return
    if max(abs(tree.value.numerator), tree.value.denominator) < 10**100:
        assert evaluate(tree.text) == tree.value


@given(st.lists(st.tuples(st.sampled_from(["+", "-", "*"]), st.integers(0, 99)), max_size=20), st.integers(0, 99))
@settings(deadline=None)
def test_precedence_without_brackets_is_pythons(rest: list[tuple[str, int]], first: int) -> None:
    total, term, sign = 0, first, 1
    for symbol, number in rest:
        if symbol == "*":
            term *= number
        else:
            total, term, sign = total + sign * term, number, 1 if symbol == "+" else -1
    expression = f"{first}" + "".join(f" {symbol} {number}" for symbol, number in rest)
    assert evaluate(expression) == total + sign * term


@given(st.one_of(st.text(max_size=60), st.text(alphabet="0123456789.,+-*/%^() epimaxsqrtround×−", max_size=60)))
@settings(max_examples=400, deadline=None)
def test_random_text_gives_a_number_or_a_calculator_error(text: str) -> None:
    began = time.process_time()
    failure: CalculatorError | None = None
    try:
        assert math.isfinite(float(format_number(evaluate(text))[:300]))
    except CalculatorError as error:
        failure = error
    assert time.process_time() - began < 1.0
    if failure is not None:
        assert "\n" not in str(failure)
        assert 1 <= failure.position <= len(text) + 1


@given(st.fractions())
@settings(deadline=None)
def test_printed_numbers_are_within_twelve_digits(value: Fraction) -> None:
    again = evaluate(format_number(value))
    assert abs(Fraction(again) - value) <= abs(value) / 10**11


@given(st.integers(-(10**50), 10**50))
@settings(deadline=None)
def test_printed_integers_read_back_exactly(value: int) -> None:
    assert evaluate(format_number(value)) == value


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (Fraction(5, 2), "2.5"),
        (2.0, "2"),
        (1e20, "1e+20"),
        (-1.5e-10, "-1.5e-10"),
        (Fraction(1, 10**7), "0.0000001"),
        (Fraction(10**13 + 1, 2), "5e+12"),
        (Fraction(123456789012345, 1000), "123456789012"),
    ],
)
def test_printing_by_hand(value: int | Fraction | float, printed: str) -> None:
    assert format_number(value) == printed


def test_the_tool_answers_and_never_raises_for_a_bad_expression() -> None:
    tool = CalculatorTool()
    assert asyncio.run(tool.execute("i", {"expression": "48 / 2"})) == ("24", None, {"ok": True})
    assert asyncio.run(tool.execute("i", {"expression": "1/0"})) == (
        "error: division by zero at position 2",
        None,
        {"ok": False},
    )
    for parameters in ({}, {"expression": 5}, {"expression": None}):
        text, reward, info = asyncio.run(tool.execute("i", parameters))
        assert (text, reward, info) == ("error: expression must be a string", None, {"ok": False})
