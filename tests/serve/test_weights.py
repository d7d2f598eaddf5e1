"""Reloading: requests under way finish on the weights they began with; a load that fails changes nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

from toolwise.concurrency.garbage import frozen_heap
from toolwise.errors import CheckpointError
from toolwise.serve.limits import TextLimits
from toolwise.serve.prometheus import ServerMetrics
from toolwise.serve.request import ChatRequest
from toolwise.serve.weights import ReloadableWeights

REQUEST = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})


CLOSED: list[int] = []
"""Versions, in the order in which they were closed."""


class Model:
    """Answers with its version, once it may."""

    name, limits = "m", TextLimits(10, 10)

    def __init__(self, version: int, may: asyncio.Event) -> None:
        self.version, self.may = version, may

    def close(self) -> None:
        CLOSED.append(self.version)

    def metrics(self) -> dict[str, float]:
        return {}

    async def read(self, raw: bytes) -> ChatRequest:
        return REQUEST

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        await self.may.wait()
        return {"version": self.version}

    async def stream(self, request: ChatRequest, short_cut: Any = None) -> AsyncIterator[dict[str, Any]]:
        yield {"version": self.version}
        await self.may.wait()
        yield {"version": self.version}


def test_requests_under_way_keep_their_weights_and_then_the_old_ones_go() -> None:
    async def play() -> None:
        CLOSED.clear()
        may = asyncio.Event()
        weights = ReloadableWeights(lambda version: Model(version, may))
        old = weakref.ref(weights.current)
        whole = asyncio.create_task(weights.complete(REQUEST))
        stream = weights.stream(REQUEST)
        seen = [await anext(stream)]
        assert await weights.reload()
        late = asyncio.create_task(weights.complete(REQUEST))
        await asyncio.sleep(0)
        assert old() is not None
        assert CLOSED == []
        may.set()
        seen += [chunk async for chunk in stream]
        assert (await whole, seen, await late) == ({"version": 0}, [{"version": 0}] * 2, {"version": 1})
        await asyncio.get_running_loop().shutdown_default_executor()
        assert CLOSED == [0]
        weights.close()
        assert CLOSED == [0, 1]
        del whole, stream
        gc.collect()
        assert old() is None

    asyncio.run(play())


def test_weights_that_were_left_out_of_collections_can_be_collected_after_a_reload() -> None:
    async def play() -> None:
        weights = ReloadableWeights(lambda version: Model(version, asyncio.Event()))
        first = weights.current
        first.itself = first  # type: ignore[attr-defined]  # only a collection frees it
        old = weakref.ref(first)
        del first
        with frozen_heap():
            assert await weights.reload()
            await asyncio.get_running_loop().shutdown_default_executor()
            gc.collect()
            assert old() is None

    asyncio.run(play())


def test_a_load_that_fails_keeps_the_old_weights() -> None:
    def load(version: int) -> Model:
        if version:
            raise CheckpointError("half a checkpoint")
        return Model(version, asyncio.Event())

    async def play() -> None:
        metrics = ServerMetrics()
        weights = ReloadableWeights(load, metrics)
        before = weights.current
        assert not await weights.reload()
        assert weights.current is before
        assert (weights.version, metrics.reloads) == (0, {"failed": 1})

    asyncio.run(play())


def test_weights_without_requests_are_closed_at_once() -> None:
    async def play() -> None:
        CLOSED.clear()
        weights = ReloadableWeights(lambda version: Model(version, asyncio.Event()))
        assert await weights.reload()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert CLOSED == [0]

    asyncio.run(play())


def test_a_reload_asked_for_during_another_follows_it() -> None:
    loading, may_end = threading.Event(), threading.Event()

    def load(version: int) -> Model:
        if version == 1:
            loading.set()
            may_end.wait(10)
        return Model(version, asyncio.Event())

    async def play() -> None:
        weights = ReloadableWeights(load)
        first = asyncio.create_task(weights.reload())
        await asyncio.to_thread(loading.wait, 10)
        assert not await weights.reload()
        assert not await weights.reload()
        may_end.set()
        assert await first
        assert weights.version == 2

    asyncio.run(play())
