"""A vLLM server as the engine: `generate` queries it, `weights_changed` sends it the learner's weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from toolwise.policies.vllm.completions import completion_body, read_completion
from toolwise.policies.vllm.control import ModelInfo, VllmControlClient
from toolwise.policies.vllm.server import VllmServer
from toolwise.policies.vllm.weights import WeightsFolder
from toolwise.protocols import Generation, GenerationEngine, Metrics, Sampling
from toolwise.remote.endpoint import Endpoint


class VllmEngine(GenerationEngine):
    """Samples from a server that holds a copy of `model`'s weights, as of the last `weights_changed`."""

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
        self.max_context = model_info.max_context
        self._transfers = 0
        self._transfer_s = 0.0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        # The version before the request: if weights change meanwhile, the oldest version counts.
        version = self.version
        body = completion_body(self.model_info.name, token_ids, sampling)
        return await self.endpoint.ask(body, lambda value, _: read_completion(value, token_ids, version))

    def weights_changed(self, version: int) -> None:
        """Blocks until the server has the weights: every later token is sampled from the new ones."""
        start = time.perf_counter()
        self.control.load(self.weights.write(self.model), version)
        self.weights.delete_old()
        self.version = version
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
