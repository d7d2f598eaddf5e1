"""Time limits outside the main thread."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import pytest

from toolwise.untrusted.limited_thread import LimitedThread
from toolwise.untrusted.time_limit import TimeLimitExceeded
from toolwise.untrusted.user_code import user_location

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
def limited() -> Any:
    thread = LimitedThread("test")
    yield thread
    thread.close()


def wait_for(event: threading.Event) -> None:
    event.wait(30)


def test_calls_share_a_thread_and_the_caller_s_context(limited: LimitedThread) -> None:
    WHO.set("me")
    threads = {limited.call(5.0, threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert limited.call(5.0, WHO.get) == "me"


@pytest.mark.parametrize("fault", [ValueError("no"), SystemExit(1), TimeoutError("its own")])
def test_what_it_raises_comes_out(fault: BaseException, limited: LimitedThread) -> None:
    def fail() -> None:
        raise fault

    with pytest.raises(type(fault)) as raised:
        limited.call(5.0, fail)
    assert raised.value is fault


def test_one_that_takes_too_long_is_abandoned_with_the_line_where_it_waits(limited: LimitedThread) -> None:
    release, began = threading.Event(), time.monotonic()
    first = limited.call(5.0, threading.get_ident)
    with pytest.raises(TimeLimitExceeded) as raised:
        limited.call(0.02, wait_for, release)
    assert time.monotonic() - began < 5
    line = wait_for.__code__.co_firstlineno + 1
    assert any((entry.path.name, entry.lineno + 1) == ("test_limited_thread.py", line) for entry in raised.traceback), (
        user_location(raised.value)
    )
    assert limited.call(5.0, threading.get_ident) != first  # the next call does not wait behind it
    release.set()


def test_a_closed_one_ends_its_thread(limited: LimitedThread) -> None:
    limited.call(5.0, int)
    thread = limited._thread
    assert thread is not None
    limited.close()
    thread.join(5)
    assert not thread.is_alive()
