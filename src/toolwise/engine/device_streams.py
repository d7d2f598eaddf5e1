"""Lets an engine and a learner use one GPU at the same time, each on a CUDA stream of its own.

What one of them writes and the other reads (the weights) is handed over by the host: it waits for the writer's stream
before it tells the reader. No other tensor crosses streams. Graphs are captured while no update runs (`CAPTURE`):
during a capture nobody may wait for the whole device, which updates do when memory is short.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from toolwise.engine.cuda_graphs import CAPTURE
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.kernels.streams import stream_for

if TYPE_CHECKING:
    from toolwise.engine.engine import Engine

Result = TypeVar("Result")


def use_own_stream(engine: Engine) -> None:
    """From now on the engine's thread works on a stream of its own; nothing changes without a GPU. Call it before the
    first request of the training, while nobody else uses the GPU."""
    device = engine.runner.device
    if device.type != "cuda":
        return
    engine.drop_cache()  # what the default stream allocated
    if isinstance(engine.runner, CudaRunner):
        engine.runner.join_weights()  # here, because it frees memory that the default stream allocated
    torch.cuda.synchronize(device)
    stream = stream_for("engine", device)
    engine._thread.submit(torch.cuda.set_stream, stream).result()  # the only thread, for as long as the engine lives


def finish_kernels(engine: Engine) -> None:
    """Wait for what the engine's thread has launched; called between two of its steps."""
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.device)


class LearnerStream:
    """Runs updates on a stream, and returns when the GPU is done with them; plain calls without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = stream_for("update", device) if device.type == "cuda" else None
        # Always the same thread: each one that computes has handles and workspaces of its own, on the GPU too.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolwise-learner")

    async def run_in_thread(self, work: Callable[[], Result]) -> Result:
        """Without blocking the event loop, always in the same thread."""
        call = partial(contextvars.copy_context().run, self.run, work)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Let the thread end, once it has nothing to do."""
        self._thread.shutdown(wait=False)

    def run(self, work: Callable[[], Result]) -> Result:
        if self._stream is None:
            return work()
        with CAPTURE, torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self.device))
            try:
                return work()
            finally:
                self._stream.synchronize()
