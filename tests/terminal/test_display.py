"""Rich's console shows text literally and styles as styles."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from terminal_bytes import foreign

from toolwise.terminal.display import Console, Live, Status, track

HOSTILE = "\x1b]0;owned\x07[link=http://evil]x[/link][red]y[/] :smile: \x1b[8mhidden\x9b2J"


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def screen() -> tuple[Console, Screen]:
    out = Screen()
    return Console(file=out, force_terminal=True, width=60, color_system="standard"), out


def test_markup_links_emoji_and_escapes_are_text() -> None:
    console, out = screen()
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    for one in (HOSTILE, Text(HOSTILE), table, Panel(Text(HOSTILE), title=Text(HOSTILE))):
        console.print(one)
    assert foreign(out.getvalue()) == ""
    assert "]8;;" not in re.sub(r"\\x1b", "", out.getvalue())
    assert "[red]y[/] :smile:" in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_our_own_styles_still_work() -> None:
    console, out = screen()
    console.print(Text("wrong", style="red"), "fine")
    console.print("everything", style="bold green")
    assert "\x1b[31mwrong\x1b[0m fine" in out.getvalue()
    assert "\x1b[1;32meverything" in out.getvalue()


def test_links_in_styles_are_left_out() -> None:
    console, out = screen()
    console.print(Text("here", style="link http://evil"))
    assert out.getvalue() == "here\n"


def test_a_table_keeps_its_shape_whatever_is_in_it() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)
    table = Table()
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_row("\x1b" * 50 + "tail", "\x9b" * 50 + "end")
    table.add_row(Text("\x1b" * 50), "")
    console.print(table)
    assert {len(line) for line in out.getvalue().splitlines()} == {60}
    assert "tail" in out.getvalue()
    assert "end" in out.getvalue()


def test_prints_beside_a_live_display_are_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    with Live(Text("display"), console=console, auto_refresh=False):
        print("\x1b[31mred\x1b[0m \x1b]8;;http://evil\x1b\\x")
        print("no end", end="", file=sys.stderr)
    assert sys.stdout is out
    assert "\\x1b[31mred\\x1b[0m" in out.getvalue()
    assert "no end" in out.getvalue()
    assert foreign(out.getvalue()) == ""


def test_a_status_line_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = screen()
    monkeypatch.setattr(sys, "stdout", out)
    with Status(console, HOSTILE) as status:
        status.update(f"two {HOSTILE}")
    assert foreign(out.getvalue()) == ""


def test_track_gives_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(3), "counting", total=3)) == [0, 1, 2]
    assert list(track(range(3), "counting", total=3, disable=True)) == [0, 1, 2]
