"""Code that never returns is ended in the main thread, wherever it is: in Python, in a pattern, in a system call."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise.untrusted import time_limit
from toolwise.untrusted.time_limit import TimeLimitError, call_within
from toolwise.untrusted.user_code import call_part_within, describe_at


def spins() -> None:
    while True:
        with suppress(Exception):
            len("")


def matches() -> None:
    re.match("(a*)*b", "a" * 60)


def waits() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.recv(1)


def catches_everything() -> None:
    for _ in range(2):
        try:
            spins()
        except BaseException:
            continue
    spins()


@pytest.mark.parametrize("function", [spins, matches, waits, lambda: threading.Event().wait()])
def test_it_ends_what_does_not_return_and_names_the_line(function: Callable[[], Any]) -> None:
    with pytest.raises(TimeLimitError) as caught:
        call_part_within(0.05, function)
    assert describe_at(caught.value).startswith(f"TimeLimitError: took longer than 0.05 s ({__file__}:")


def test_it_is_raised_again_in_code_that_catches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "REPEAT_S", 0.02)
    with pytest.raises(TimeLimitError):
        call_part_within(0.02, catches_everything)


def test_what_returns_in_time_is_left_alone() -> None:
    assert call_within(60.0, int, "7", base=8) == 7
    with pytest.raises(ZeroDivisionError):
        call_part_within(60.0, lambda: 1 / 0)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_another_timer_goes_on_and_its_handler_comes_back() -> None:
    fired = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: fired.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 30.0)
        with pytest.raises(TimeLimitError):
            call_part_within(0.01, spins)
        assert 20.0 < signal.getitimer(signal.ITIMER_REAL)[0] < 30.0
        signal.raise_signal(signal.SIGALRM)
        assert fired.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_have_no_limit() -> None:
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(call_within(0.001, lambda: time.sleep(0.01) or "done")))
    thread.start()
    thread.join()
    assert results == ["done"]


def test_what_it_changed_before_it_was_ended_is_restored() -> None:
    def disables() -> None:
        torch.set_grad_enabled(False)
        spins()

    with pytest.raises(TimeLimitError):
        call_part_within(0.01, disables)
    assert torch.is_grad_enabled()


def test_the_working_folder_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's folder may be given relative to it."""
    monkeypatch.chdir(tmp_path)
    call_part_within(5.0, os.chdir, "/")
    assert Path.cwd() == tmp_path


def test_an_interrupt_while_the_limit_is_set_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    real, handler = signal.setitimer, signal.getsignal(signal.SIGALRM)

    def interrupted(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        result = real(which, seconds, interval)
        if seconds:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(signal, "setitimer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call_within(5.0, int)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == handler
