"""Fuzzing with hypothesis: a few fixed examples in the usual run, as many as fit `FUZZ_MINUTES` where it is set.

`make fuzz MINUTES=30` shares the minutes out among the targets in tests/fuzz (conftest.py there sets `time_each`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
_seconds_each = 60.0 * MINUTES
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]


def time_each(targets: int) -> None:
    """Shares the time out."""
    global _seconds_each
    _seconds_each = 60.0 * MINUTES / max(1, targets)


def fuzz(*strategies: Any, examples: int = 25) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """`examples` that are the same each time; or new ones until the time is over, each round with a seed that a
    failure names. Arguments are drawn from `strategies` in order."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            common = {"deadline": None, "database": None, "suppress_health_check": _QUIET}
            if not MINUTES:
                phases = (Phase.generate, Phase.shrink)
                settings(max_examples=examples, derandomize=True, phases=phases, **common)(given(*strategies)(check))()
                return
            ends, tried = time.monotonic() + _seconds_each, 0
            while time.monotonic() < ends:
                number = secrets.randbits(32)
                try:
                    seed(number)(settings(max_examples=200, **common)(given(*strategies)(check)))()
                except BaseException as fault:
                    fault.add_note(f"seed {number}, after {tried:,} examples")
                    raise
                tried += 200
            print(f"\n{check.__module__}.{check.__name__}: {tried:,} examples in {_seconds_each:.0f} s")

        run.__name__, run.__doc__, run.__module__ = check.__name__, check.__doc__, check.__module__
        return run

    return decorate


ODD = st.sampled_from(
    [
        "",
        " ",
        "\x00",
        "\x1b[2J",
        "\ud800",
        "\u202e",
        "\ufeff",
        "\U0001f937\U0001f3fd\u200d\u2640\ufe0f",
        "e\u0301",
        "<|im_end|>",
        "</tool_call>",
        "{{ 7 * 7 }}",
        "{% for x in range(9) %}",
        "a" * 3000,
        "NaN",
        "1e999",
        "9" * 4500,
        "../../etc/passwd",
        "$ref",
    ]
)
TEXT = st.one_of(st.text(max_size=40), ODD, st.lists(ODD, max_size=4).map("".join))
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, -1e308, float("nan"), float("inf")]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value
