"""Printed lines and guarded standard streams."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from toolwise.terminal import guard_streams, print_error, print_json, print_line
from toolwise.terminal.streams import MAX_ERROR_CHARS, GuardedStream

ESCAPE = "\x1b]0;owned\x07"


def test_print_line_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"a {ESCAPE}")
    print_line(f"b {ESCAPE}", err=True)
    shown = capsys.readouterr()
    assert shown.out == "a \\x1b]0;owned\\x07\n"
    assert shown.err == "b \\x1b]0;owned\\x07\n"


def test_an_error_is_one_line_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("x" * (MAX_ERROR_CHARS + 5) + "\nsecond\rthird")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith("toolwise: xxx")
    assert "… cut, " in shown
    assert len(shown) < MAX_ERROR_CHARS + 100


def test_json_has_no_control_characters_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": f"{ESCAPE}\x9b\u202e\ud800", "value": float("nan")})
    shown = capsys.readouterr().out
    assert not any(c in shown for c in "\x1b\x07\x9b\u202e")
    assert json.loads(shown) == {"name": f"{ESCAPE}\x9b\u202e\ud800", "value": None}


def test_a_terminal_without_unicode_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_line("loss 1 → 2")
    assert raw.getvalue() == b"loss 1 ? 2\n"


def test_all_prints_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    guard_streams()
    guard_streams()
    assert isinstance(sys.stdout, GuardedStream)
    assert sys.stdout.stream is out
    print(ESCAPE)
    logger = logging.Logger("loud")
    logger.addHandler(logging.StreamHandler())
    try:
        raise ValueError(ESCAPE)
    except ValueError:
        logger.exception("it said %s", ESCAPE)
    assert "\x1b" not in out.getvalue() + err.getvalue()
    assert out.getvalue() == "\\x1b]0;owned\\x07\n"
    assert err.getvalue().count("\\x1b]0;owned") == 2


def test_the_guard_stands_for_its_stream() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    guard = GuardedStream(file)
    assert (guard.encoding, guard.isatty(), guard.writable(), guard.buffer) == ("latin-1", False, True, file.buffer)
    guard.close()
    guard.write("still open")
    with pytest.raises(TypeError):
        guard.write(b"bytes")  # type: ignore[arg-type]
