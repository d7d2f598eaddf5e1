"""Limits on values from user code: numbers, names, texts and their counts.

Longer texts are cut, with a note of how much is missing; larger numbers are rejected by the code that reads them.
"""

from __future__ import annotations

MAX_SCORE = 1e12
"""For scores, step rewards and costs: larger values overflow when squared in single precision."""
MAX_METRIC_VALUE = 1e30
MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 20_000
MAX_FAULT_CHARS = 20_000
MAX_OBSERVATION_CHARS = 4_000_000
"""Characters of one observation: more than fit into any model's context."""
MAX_METRICS = 256
"""Metrics per result, and distinct metrics per line of metrics.jsonl."""
MAX_STEP_OUTPUTS = 10_000
MAX_CALLS = 1_000
"""Tool calls in one reply of a model, or of a user's parser."""
MAX_WARNINGS = 20
MAX_DISTINCT_NAMES = 256
"""Distinct tools counted per episode, and distinct task kinds per validation."""


def in_bounds(number: float, largest: float = MAX_SCORE) -> bool:
    """Whether |number| ≤ `largest`; False for NaN."""
    return -largest <= number <= largest


def truncate_text(text: str, max_chars: int) -> str:
    """`text`, cut to `max_chars` with a note of how much is missing. Lone surrogates are escaped."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]} … cut, {len(text) - max_chars:,} characters"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
