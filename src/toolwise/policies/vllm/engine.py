"""A vLLM server as the engine: `generate` queries it, `weights_changed` and `replace_weights` send it weights."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, Literal

from toolwise.concurrency.tasks import spawn
from toolwise.policies.vllm.completions import Completion, completion_body, parse_completion
from toolwise.policies.vllm.control import ModelInfo, VllmControlClient
from toolwise.policies.vllm.reload_gate import ReloadGate
from toolwise.policies.vllm.server import VllmServer
from toolwise.policies.vllm.weights import WeightsFolder
from toolwise.protocols import Generation, Metrics, ReloadingEngine, Sampling
from toolwise.remote.endpoint import Endpoint

PAUSE_AGAIN_S = 0.5


class VllmEngine(ReloadingEngine):
    """Samples from a server that holds a copy of `model`'s weights, as of the last `weights_changed` or
    `replace_weights`."""

    def __init__(
        self,
        model: Any,
        model_info: ModelInfo,
        *,
        control: VllmControlClient,
        endpoint: Endpoint,
        weights: WeightsFolder,
        server: VllmServer | None = None,
    ) -> None:
        """`endpoint` is that of /v1/completions. `control`, `weights` and `server` are closed with this engine."""
        self.model = model
        self.model_info = model_info
        self.control = control
        self.endpoint = endpoint
        self.weights = weights
        self.server = server
        self.version = 0
        self.max_context, self.cache_tokens = model_info.max_context, model_info.cache_tokens
        self.gate = endpoint.gate = ReloadGate()
        self._under_way, self._whole_replies, self._busy_s, self._busy_since = 0, 0, 0.0, 0.0
        self._transfers = 0
        self._transfer_s = 0.0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """A reply that a reload interrupts goes on from the tokens it has, which keep their version and log-probs."""
        ids, logprobs, versions = array("i"), array("f"), array("q")
        with self._counted(sampling):
            while True:
                part, version = await self._next_part(token_ids, ids, sampling)
                ids += part.token_ids
                logprobs += part.logprobs
                versions.extend([version] * len(part.token_ids))
                if (finish := _finish_reason(part, ids, sampling)) is not None:
                    break
        several = versions if versions[0] != versions[-1] else None
        return Generation(ids, logprobs, finish, versions[0], several)

    async def _next_part(self, prompt: Sequence[int], ids: array[int], sampling: Sampling) -> tuple[Completion, int]:
        """Continue a reply that has these tokens; also returns the version of the weights."""
        if ids:  # with the same seed the server would draw the same random numbers again
            seed = Random(f"continue/{sampling.seed}/{len(ids)}").getrandbits(63)
            sampling = replace(sampling, seed=seed, max_new_tokens=sampling.max_new_tokens - len(ids))
        tokens = [*prompt, *ids]

        def read(body: Any, _: Any) -> tuple[Completion, int]:
            # Between the end of the request and this line nothing else ran: the version is that of its tokens.
            return parse_completion(body, tokens, may_abort=self.gate.closed), self.version

        return await self.endpoint.ask(completion_body(self.model_info.name, tokens, sampling), read)

    @contextmanager
    def _counted(self, sampling: Sampling) -> Iterator[None]:
        stops = bool(sampling.stop_strings)
        self._busy_since = self._busy_since if self._under_way else time.perf_counter()
        self._under_way += 1
        self._whole_replies += stops
        try:
            yield
        finally:
            self._under_way -= 1
            self._whole_replies -= stops
            if not self._under_way:
                self._busy_s += time.perf_counter() - self._busy_since

    @property
    def busy_s(self) -> float:  # type: ignore[override]  # nobody sets it
        """Seconds in which any request was under way."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._under_way else 0.0)

    def weights_changed(self, version: int) -> None:
        """Blocks until the server has the weights: every later token is sampled from the new ones."""
        start = time.perf_counter()
        self.control.load(self.weights.write(self.model), version)
        self._loaded(version, start)

    async def replace_weights(self, write: Callable[[], None], version: int) -> None:
        """Run `write`, which changes `model`, and give the server its weights while requests are under way. If it fails
        no request goes on, because nobody knows the server's weights, until another call succeeds. Once begun it goes
        on even if the caller is cancelled."""
        await asyncio.shield(spawn(self._reload(write, version)))

    async def _reload(self, write: Callable[[], None], version: int) -> None:
        start = time.perf_counter()
        write()
        folder = await asyncio.to_thread(self.weights.write, self.model)
        self.gate.close()
        await self._interrupt_replies()
        await asyncio.to_thread(self.control.load, folder, version)
        self._loaded(version, start)

    async def _interrupt_replies(self) -> None:
        """Have the server return the replies under way as they are. Those with stop strings end first: the server looks
        for a string in one part of a reply only."""
        while self.gate.inside:
            if not self._whole_replies:
                await asyncio.to_thread(self.control.interrupt)
            try:
                async with asyncio.timeout(PAUSE_AGAIN_S):  # a request on its way was not there to be interrupted
                    await self.gate.empty()
            except TimeoutError:
                continue

    def _loaded(self, version: int, start: float) -> None:
        self.weights.delete_old()
        self.version = version
        self.gate.open()
        self._transfers += 1
        self._transfer_s += time.perf_counter() - start

    def metrics(self) -> Metrics:
        transfers = {"policy/transfers": float(self._transfers), "policy/transfer_s": self._transfer_s}
        return self.endpoint.metrics() | transfers

    def close(self) -> None:
        """Close the connections, remove the weights folder, and stop the server if it was started here."""
        self.control.close()
        self.weights.close()
        if self.server is not None:
            self.server.close()


def _finish_reason(part: Completion, ids: array[int], sampling: Sampling) -> Literal["stop", "length"] | None:
    """None if there is more to sample; a reply may be interrupted just when it has ended."""
    if part.finish_reason != "abort":
        return part.finish_reason
    if ids and ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(ids) >= sampling.max_new_tokens else None
