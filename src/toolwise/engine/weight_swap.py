"""Gives a running engine new weights between two of its steps, while requests are in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from toolwise.protocols import ReloadingEngine

if TYPE_CHECKING:
    from toolwise.engine.engine import Engine
    from toolwise.engine.scheduler import Scheduler


async def replace_weights(
    engine: Engine | ReloadingEngine, write: Callable[[], None], version: int, *, keep_cache: bool = False
) -> None:
    """Run `write`, which changes the engine's parameters, between two steps; return when the next step will use them.

    Requests in progress go on: the tokens they have stay as sampled, with their log-probs and versions. Their keys and
    values are computed again, so that every later token is one of the new weights alone. With `keep_cache` replies keep
    them: their later tokens come from the new weights on the keys and values of the old, and have the old version.
    """
    if isinstance(engine, ReloadingEngine):
        return await engine.replace_weights(write, version)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    faults: list[Exception] = []

    def guarded() -> None:
        try:
            write()
        except Exception as fault:  # on the engine's thread, where nobody would see it
            faults.append(fault)

    def resolve() -> None:
        if not done.done():
            done.set_result(None)

    def report() -> None:
        loop.call_soon_threadsafe(resolve)

    engine.weights_changed(version, keep_cache=keep_cache, write=guarded)
    engine.run_between_steps(report)
    await done
    if faults:
        raise faults[0]
    return None


def keep_replies(scheduler: Scheduler, version: int) -> None:
    """Before `version` is replaced: keep what replies under way have computed, for them alone, and nothing else."""
    for request in list(scheduler.running):
        if request.kind != "generate" or not request.sampled:
            scheduler.preempt(request)
        elif request.cache_version is None:
            request.cache_version = version
    scheduler.blocks.forget([request.lease for request in scheduler.running])


def fingerprint(parameters: Sequence[Tensor]) -> tuple[int, int]:
    """The number of parameters and how often they were written to. Changes whenever a parameter is written or added, so
    that an unannounced update is noticed."""
    versions = [0 if p.is_inference() else p._version for p in parameters]
    return len(versions), sum(versions)


def tokens_in_flight(engine: Engine) -> int:
    """Tokens of the requests that have not finished, prompts included."""
    return sum(len(request.tokens) for request in engine.scheduler.requests)
