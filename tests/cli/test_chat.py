"""`toolwise chat` in a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from trained_router import routed_folder

SUM = "What is 4321 - 1234?"


class Terminal:
    """A process in a pseudo-terminal, its controlling terminal, so that Ctrl-C is a signal."""

    def __init__(self, *arguments: object, folder: Path) -> None:
        self.controller, terminal = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        code = (
            "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            # A test that was started in the background may ignore it, and its children too.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from toolwise.cli import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(terminal)
        self.text = ""

    def expect(self, *words: str, within_s: float = 90) -> str:
        """What it wrote until all of `words` came, in this order."""
        end = time.monotonic() + within_s
        while True:
            position = 0
            for word in words:
                position = self.text.find(word, position)
                if position < 0:
                    break
                position += len(word)
            else:
                seen, self.text = self.text[:position], self.text[position:]
                return seen
            ready, _, _ = select.select([self.controller], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words} did not come: {self.text!r}"
            try:
                self.text += os.read(self.controller, 65536).decode("utf-8", "replace").replace("\r\n", "\n")
            except OSError:
                raise AssertionError(f"it ended before {words} came: {self.text!r}") from None

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def interrupt(self, *words: str) -> None:
        """Type Ctrl-C until `words` come. One that falls between readline's prompt and its wait for a key is
        noticed with the next key only: a gap in Python's `input` that is too short for a person."""
        for _ in range(30):
            self.type("\x03")
            with suppress(AssertionError):
                self.expect(*words, within_s=3)
                return
        raise AssertionError(f"{words} did not come: {self.text!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.controller)


SLOW_TOOL = '''
import time

def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if "9876" in expression:
        time.sleep(600)
    return str(eval(expression))
'''


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "slow.py").write_text(SLOW_TOOL)
    options = ("--tools", "slow.py:calculator", "--max-cost", "3", "--set", "rollout.max_new_tokens=48")
    terminal = Terminal("chat", "builtin:small", *options, folder=tmp_path)
    yield terminal
    terminal.close()


def test_a_conversation_in_which_ctrl_c_ends_an_answer_and_not_the_chat(chat: Terminal, tmp_path: Path) -> None:
    chat.expect("/help lists the commands", "> ")
    chat.interrupt("/quit leaves", "> ")
    chat.type("What is 9876 - 1234?\n")
    chat.expect("calculator(")
    chat.type("\x03")
    chat.expect("stopped; the question is left out", "> ", within_s=40)
    chat.type("/cap\n")
    chat.expect("0 so far, 3 left", "> ")
    chat.type(f"{SUM}\n")
    chat.expect("calculator(", "3087", "Answer: 3087", "[cost 1,", "1 so far, 2 left]", "> ")
    chat.type("/tools\n")
    chat.expect("calculator (costs 1): ", "> ")
    chat.type("/cap 0\n")
    chat.expect("1 so far, 0 left", "> ")
    chat.type("What is 77 * 31?\n")
    chat.expect("[cost 0", "1 so far, 0 left]", "> ")
    mistakes = {
        "/cap much": "is not a cost",
        "/budget 1": "has no router",
        "/dance": "there is no command /dance",
        "/save": "needs the name",
        "/save no/such/x": "cannot be written",
    }
    for wrong, said in mistakes.items():
        chat.type(f"{wrong}\n")
        chat.expect(said, "> ")
    chat.type("/route answer\n")
    chat.expect("has no router", "> ")
    chat.type("/save talk.json\n")
    chat.expect("wrote talk.json", "> ")
    roles = [message["role"] for message in json.loads((tmp_path / "talk.json").read_text())]
    assert roles.count("user") == 2
    chat.type("/save talk.json\n")
    chat.expect("already exists", "> ")
    chat.type("/help\n")
    chat.expect("/budget", "/cap", "/quit", "> ")
    chat.type("\x04")  # the end of the input
    assert chat.process.wait(30) == 0


def test_a_routed_agent_shows_its_odds_and_takes_a_route_and_a_budget(tmp_path: Path) -> None:
    folder = routed_folder(tmp_path / "agent", bias=[0.0, -1.0, 2.0], eval_mode="argmax")
    options = ("--tools", "calculator", "--set", "rollout.max_new_tokens=48")
    terminal = Terminal("chat", folder, *options, folder=tmp_path)
    try:
        terminal.expect("/help lists the commands", "> ")
        terminal.type(f"{SUM}\n")
        seen = terminal.expect("route: ", "[cost 1,", "1 so far, no limit]", "> ")
        odds = dict(re.findall(r"([A-Z-]+) (0\.\d\d)", seen))
        assert max(odds, key=lambda name: float(odds[name])) == re.search(r"route: ([A-Z-]+)", seen)[1]  # type: ignore[index]
        assert sum(map(float, odds.values())) == pytest.approx(1, abs=0.02)
        terminal.type("/tools\n")
        terminal.expect("calculator (costs 1): ", "> ")
        terminal.type("/route answer\n")
        terminal.expect("route: ANSWER; there are auto, ", "> ")
        terminal.type(f"{SUM}\n")
        assert "calculator(" not in terminal.expect("route: ANSWER", "[cost 0,", "> ")
        terminal.type("/route dance\n")
        terminal.expect("'dance'", "> ")
        terminal.type("/route auto\n")
        terminal.expect("route: auto", "> ")
        terminal.type("/budget 0.25\n")
        terminal.expect("not calibrated for a budget", "> ")
        terminal.type("/budget\n")
        terminal.expect("budget: auto", "> ")
        terminal.type("/budget auto\n")
        terminal.expect("budget: auto", "> ")
        terminal.type("/save talk.json\n")
        terminal.expect("wrote talk.json", "> ")
        roles = [message["role"] for message in json.loads((tmp_path / "talk.json").read_text())]
        assert roles.count("user") == 2
        terminal.type("/quit\n")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
