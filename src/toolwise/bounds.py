"""Limits on what other people's code may hand us: numbers, names, texts and how many of them.

What is longer is cut, with a mark that says by how much; what is larger is refused by whoever reads it, by name.
"""

from __future__ import annotations

LARGEST_SCORE = 1e12
"""Of scores, step rewards and costs: larger ones overflow when they are squared in single precision."""
LARGEST_METRIC = 1e30
LONGEST_NAME = 200
LONGEST_REASON = 20_000
LONGEST_FAULT = 20_000
LONGEST_OBSERVATION = 4_000_000
"""Characters that a world may say in one step: more than any model's context holds."""
MOST_METRICS = 256
"""Metrics of one result, and different ones in one line of metrics.jsonl."""
MOST_STEP_OUTPUTS = 10_000
MOST_WARNINGS = 20
MOST_NAMES = 256
"""Different tools that one episode's calls are counted by; kinds of task that a validation tells apart."""


def in_bounds(number: float, largest: float = LARGEST_SCORE) -> bool:
    """Whether it is finite and no larger than `largest` either way."""
    return -largest <= number <= largest


def cut(text: str, longest: int) -> str:
    """`text`, or its beginning with a mark; never half a character."""
    if len(text) > longest:
        text = f"{text[:longest]} … cut, {len(text) - longest:,} characters"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
