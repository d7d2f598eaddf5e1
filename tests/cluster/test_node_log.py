"""The lines that a process on another node logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from toolwise.cluster.node_log import LogLines


@pytest.fixture
def lines() -> Iterator[LogLines]:
    lines = LogLines()
    yield lines
    logging.getLogger("toolwise").removeHandler(lines)


def test_lines_are_taken_once(lines: LogLines) -> None:
    logging.getLogger("toolwise.test").warning("%d of %d", 1, 2)
    lines.add_print("score", 0.5)
    taken = lines.take().decode().splitlines()
    assert [line.split(": ", 1)[1] for line in taken] == ["1 of 2", "score 0.5"]
    assert lines.take() == b""


def test_a_line_that_cannot_be_formatted_ends_nothing(lines: LogLines, capsys: pytest.CaptureFixture[str]) -> None:
    lines.emit(logging.makeLogRecord({"msg": "%d", "args": ("x",)}))
    assert lines.take() == b""
    assert "Logging error" in capsys.readouterr().err
