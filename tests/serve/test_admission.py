"""The bounded queue: who is answered, who waits, who is told to come back."""

from __future__ import annotations

import asyncio

import pytest

from toolwise.serve.admission import Admission
from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import BadRequestError


def test_beyond_the_queue_requests_are_told_when_to_come_back() -> None:
    async def play() -> None:
        admission = Admission(ServerLimits(active=1, queued=1), mean_s=2.5)
        ended = asyncio.Event()

        async def hold() -> None:
            async with admission.slot():
                await ended.wait()

        tasks = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        assert (admission.active, admission.waiting) == (1, 1)
        with pytest.raises(BadRequestError) as refused:
            admission.check()
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert refused.value.headers == {"Retry-After": "5"}
        ended.set()
        await asyncio.gather(*tasks)
        assert (admission.active, admission.waiting) == (0, 0)
        admission.check()

    asyncio.run(play())


@pytest.mark.parametrize("at", ["in the queue", "in its turn"])
def test_a_request_that_leaves_frees_its_place(at: str) -> None:
    async def play() -> None:
        admission = Admission(ServerLimits(active=1, queued=5))

        async def hold() -> None:
            async with admission.slot():
                await asyncio.Event().wait()

        first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        leaving = second if at == "in the queue" else first
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0)
        assert (admission.active, admission.waiting) == (1, 0)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert admission.active == 0

    asyncio.run(play())
