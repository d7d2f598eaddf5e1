"""What a program's process does with the text, tested in this one: runs it, prints a final value, reports faults."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from toolwise.sandbox.programs.program_main import PROGRAM_FILENAME, _execute, _report_exception


def test_the_value_of_a_last_expression_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _execute("x = 6\nx * 7", {})
    _execute("print('said')\nNone", {})
    _execute("x = 1", {})
    _execute("", {})
    assert capsys.readouterr().out == "42\nsaid\n"


def test_globals_belong_to_the_program() -> None:
    names: dict[str, Any] = {}
    _execute("y = 2", names)
    assert names["y"] == 2
    with pytest.raises(NameError):
        _execute("annotations", {})
    with pytest.raises(NameError):  # our __future__ imports do not apply to it
        _execute("def f(x: nowhere): pass", {})


def _told(text: str, permissions: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    read, write = os.pipe()
    try:
        _execute(text, {})
    except BaseException as fault:
        _report_exception(fault, write, permissions)
    os.close(write)
    with os.fdopen(read) as file:
        line = file.read()
    return json.loads(line) if line else {}, line


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raise MemoryError", "memory"),
        ("raise OSError(27, 'File too large')", "too_big"),
        ("raise PermissionError(13, 'Permission denied', '/etc/x')", "denied"),
        ("raise OSError(30, 'Read-only file system', '/etc/x')", "denied"),
        ("raise ValueError('x')", None),
    ],
)
def test_faults_are_reported_besides_the_exit_status(
    text: str, kind: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    told, _ = _told(text)
    assert told.get("kind") == kind
    shown = capsys.readouterr().err
    assert f'File "{PROGRAM_FILENAME}", line 1' in shown
    assert "program_main" not in shown


def test_permitted_failures_are_not_reported_as_denied(capsys: pytest.CaptureFixture[str]) -> None:
    told, _ = _told("import socket\nraise socket.gaierror(-2, 'Name or service not known')", ("network",))
    assert told == {}
    assert "gaierror" in capsys.readouterr().err
