"""Limits on what other people's code may hand us: numbers, names, texts and how many of them.

What is longer is cut, with a mark that says by how much; what is larger is refused by whoever reads it, by name.
"""

from __future__ import annotations

MAX_SCORE = 1e12
"""Of scores, step rewards and costs: larger ones overflow when they are squared in single precision."""
MAX_METRIC_VALUE = 1e30
MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 20_000
MAX_FAULT_CHARS = 20_000
MAX_OBSERVATION_CHARS = 4_000_000
"""Characters that a world may say in one step: more than any model's context holds."""
MAX_METRICS = 256
"""Metrics of one result, and different ones in one line of metrics.jsonl."""
MAX_STEP_OUTPUTS = 10_000
MAX_WARNINGS = 20
MAX_DISTINCT_NAMES = 256
"""Different tools that one episode's calls are counted by; kinds of task that a validation tells apart."""


def in_bounds(number: float, largest: float = MAX_SCORE) -> bool:
    """Whether it is finite and no larger than `largest` either way."""
    return -largest <= number <= largest


def truncate_text(text: str, max_chars: int) -> str:
    """`text`, or its beginning with a mark; never half a character."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]} … cut, {len(text) - max_chars:,} characters"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
