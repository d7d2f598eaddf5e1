"""What workers print: attributed to calls, bounded, and never blocking."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from toolwise.sandbox import Sandbox
from toolwise.sandbox.output import MAX_KEPT_BYTES, MarkedStream, Output, current_call


def test_marks_tell_calls_apart_also_when_they_come_in_pieces() -> None:
    output = Output()
    output.begin(["a", "b"])
    for byte in b"before\n\x1e1\x1fone\n\x1e0\x1fzero\n\x1e1\x1fmore\n":
        output.feed(bytes([byte]))
    assert output.format_printed(0) == "\nIt printed:\nbefore\nzero\n"
    assert output.take() == [("", "before\n"), ("a", "zero\n"), ("b", "one\nmore\n")]
    assert output.take() == []


def test_a_call_alone_needs_no_mark() -> None:
    output = Output()
    output.begin(["a"])
    output.feed(b"text")
    assert output.take() == [("a", "text")]


def test_forged_marks_and_floods_do_no_harm() -> None:
    output = Output()
    output.begin(["a", "b"])
    output.feed(b"\x1e999999\x1fx\x1e\x1f\x1e1\x1f" + b"y" * (3 * MAX_KEPT_BYTES))
    (nobody, _), (label, text) = output.take()
    assert (nobody, label) == ("", "b")
    assert text.endswith(f"… and {2 * MAX_KEPT_BYTES:,} bytes more")


def test_a_stream_marks_whenever_the_call_changes() -> None:
    raw = io.BytesIO()
    stream, other = MarkedStream(raw), MarkedStream(raw)
    MarkedStream.last = -1
    token = current_call.set(3)
    print("a", file=stream)
    print("b", file=other)
    current_call.set(4)
    print("c \ud800", file=stream)
    current_call.reset(token)
    assert raw.getvalue() == b"\x1e3\x1fa\nb\n\x1e4\x1fc \\ud800\n"


@pytest.mark.parametrize("tier", ["basic", "standard"])
def test_a_function_that_prints_without_end_is_not_held_up(tier: str, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import os\n"
        "def f(messages, truth):\n"
        "    for _ in range(200): print('x' * 10_000)\n"
        "    os.write(1, b'straight to the pipe')\n"
        "    return 1.0\n"
    )
    told: list[tuple[str, str]] = []
    with Sandbox(tier, timeout_s=20) as sandbox:  # type: ignore[arg-type]
        sandbox.on_print = lambda label, text: told.append((label, text))
        results = sandbox.evaluate_batch(f"{tmp_path / 'r.py'}:f", [[]] * 4, [None] * 4)
    assert [result.score for result in results] == [1.0] * 4
    assert len(told) == 4
    assert all(len(text) < 2 * MAX_KEPT_BYTES and "bytes more" in text for _, text in told)


def test_a_fault_shows_what_its_own_call_printed(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def f(messages, truth):\n    print('about', truth)\n    if truth == 2: raise ValueError\n    return 1.0\n"
    )
    with Sandbox(timeout_s=20, workers=1) as sandbox:
        results = sandbox.evaluate_batch(f"{tmp_path / 'r.py'}:f", [[]] * 4, [0, 1, 2, 3])
    assert results[2].error is not None
    assert results[2].error.traceback.endswith("It printed:\nabout 2\n")
