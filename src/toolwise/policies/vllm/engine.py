"""vLLM in the place of the engine: `generate` asks the server, `weights_changed` sends it the learner's weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from toolwise.policies.openai.endpoint import Endpoint
from toolwise.policies.vllm.completions import completion_body, read_completion
from toolwise.policies.vllm.control import ModelInfo, VllmControlClient
from toolwise.policies.vllm.server import VllmServer
from toolwise.policies.vllm.weights import WeightsFolder
from toolwise.protocols import Generation, Metrics, Sampling


class VllmEngine:
    """Draws from a server that holds a copy of `model`'s weights, those of the last `weights_changed`."""

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
        """`endpoint` is that of /v1/completions. All of them, and `server`, are closed with this engine."""
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
        # Of before the request: should weights change on the way, the oldest is what counts.
        version = self.version
        body = completion_body(self.model_info.name, token_ids, sampling)
        found = await self.endpoint.ask(body, lambda value, _: read_completion(value, token_ids))
        return Generation(found.token_ids, found.logprobs, found.finish_reason, version)

    def weights_changed(self, version: int) -> None:
        """Blocks until the server has them: a token drawn after this is drawn from the new weights."""
        began = time.perf_counter()
        self.control.load(self.weights.write(self.model), version)
        self.weights.delete_old()
        self.version = version
        self._transfers += 1
        self._transfer_s += time.perf_counter() - began

    def metrics(self) -> Metrics:
        transfers = {"policy/transfers": float(self._transfers), "policy/transfer_s": self._transfer_s}
        return self.endpoint.metrics() | transfers

    def close(self) -> None:
        """The connections, the folder of weights, and the server where it is ours."""
        self.control.close()
        self.weights.close()
        if self.server is not None:
            self.server.close()
