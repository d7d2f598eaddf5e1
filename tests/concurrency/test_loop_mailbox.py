"""A loop that is busy gets all that has come meanwhile in one call; one that is closed gets nothing."""

from __future__ import annotations

import asyncio
import threading

from toolwise.concurrency.loop_mailbox import LoopMailbox


def test_a_busy_loop_gets_everything_at_once_and_in_order() -> None:
    async def work() -> list[list[int]]:
        calls: list[list[int]] = []
        mailbox = LoopMailbox[int](lambda loop, items: calls.append(items))
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=lambda: [mailbox.send(loop, [n, -n]) for n in (1, 2, 3)])
        thread.start()
        thread.join()  # the loop has had no time to look
        await asyncio.sleep(0)
        mailbox.send(loop, [4])
        await asyncio.sleep(0)
        return calls

    assert asyncio.run(work()) == [[1, -1, 2, -2, 3, -3], [4]]


def test_a_closed_loop_is_forgotten() -> None:
    calls: list[list[int]] = []
    mailbox = LoopMailbox[int](lambda loop, items: calls.append(items))
    closed, late = asyncio.new_event_loop(), asyncio.new_event_loop()
    late.close()
    mailbox.send(closed, [1])
    closed.close()  # before it could look
    mailbox.send(late, [2])

    async def work() -> None:
        mailbox.send(asyncio.get_running_loop(), [3])
        await asyncio.sleep(0)

    asyncio.run(work())
    assert calls == [[3]]
    assert mailbox._waiting == {}
