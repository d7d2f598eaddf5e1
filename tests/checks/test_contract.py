"""Code that blocks the event loop is named, and does not block the checker."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from toolwise.checks.contract import run_watched


def test_work_that_awaits_is_never_blocked() -> None:
    async def work() -> None:
        await asyncio.sleep(0.2)

    assert run_watched(work, limit_s=1, min_block_s=1, blocked="warning") == ("ok", "never blocked")


def test_a_short_block_is_told_with_its_place() -> None:
    async def work() -> None:
        time.sleep(0.8)  # noqa: ASYNC251

    verdict, says = run_watched(work, limit_s=30, min_block_s=0.2, blocked="warning")
    assert verdict == "warning"
    assert says.startswith("test_contract.py:")
    assert "work" in says


def test_a_loop_that_closes_slowly_is_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    close = asyncio.SelectorEventLoop.close

    def close_slowly(loop: asyncio.SelectorEventLoop) -> None:
        time.sleep(0.8)
        close(loop)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "close", close_slowly)

    async def work() -> None:
        await asyncio.sleep(0.05)

    assert run_watched(work, limit_s=30, min_block_s=0.2, blocked="warning") == ("ok", "never blocked")


def test_a_block_that_does_not_end_is_given_up() -> None:
    free = threading.Event()

    async def work() -> None:
        while not free.is_set():
            sum(range(1000))

    began = time.monotonic()
    verdict, says = run_watched(work, limit_s=0.4, min_block_s=0.2, blocked="warning")
    free.set()
    assert verdict == "wrong"
    assert "blocked the event loop, and so all rollouts, for over 0.4 s" in says
    assert time.monotonic() - began < 10


def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_watched(work, limit_s=1, min_block_s=1, blocked="warning")
