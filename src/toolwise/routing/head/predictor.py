"""Predictions of a router's head: the trunk computes the features of prompts, the head the routes; one pass per prompt.

The head that is saved is the mean of the router's weights, and of λ, over the last updates of a run. Reward and cost
pull against each other, so the head of a single step oscillates around the budget, the more so the closer λ is to the
value of a call. The averaged head spends the mean of what these heads spend.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from toolwise.config.router import RouterConfig
from toolwise.errors import CheckpointError, ModelError
from toolwise.learner.forward import can_share_prefixes, hidden_states
from toolwise.learner.packing import micro_batches
from toolwise.models.weight_sharing import shared_copy
from toolwise.protocols import GenerationEngine, PrefixEngine
from toolwise.routing.head.cpu_features import CpuFeatures
from toolwise.routing.head.head import RouterHead, load_head, predict_routes
from toolwise.routing.head.read_ahead import ReadAhead, has_free_core
from toolwise.routing.samples import RoutePrediction

Pool = Literal["last", "mean"]
Encode = Callable[[Sequence[Sequence[int]]], Tensor]


class PromptRow:
    """A prompt as a row for packing, which selects the hidden states that predict the `sampled` tokens: with a token
    that is never computed, and a mark for each token whose predecessor's state is needed."""

    def __init__(self, prompt: Sequence[int], pool: Pool) -> None:
        before = len(prompt) - 1 if pool == "last" else 0
        self.ids = [*prompt, 0]
        self.sampled = [False] * (before + 1) + [True] * (len(prompt) - before)


def prompt_features(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    pool: Pool = "last",
    layers: Sequence[int] = (-1,),
    max_tokens: int = 16_384,
) -> Tensor:
    """[prompts, width] in fp32. Prompts are packed without padding; shared prefixes are computed once."""
    rows = [PromptRow(prompt, pool) for prompt in prompts]
    sums = torch.zeros(len(rows), feature_width(model, layers), device=model.device)
    for packed in micro_batches(rows, max_tokens, share_prefixes=can_share_prefixes(model), device=model.device):
        sums = sums.index_add(0, packed.row, _layer_states(model, packed, layers)[packed.source].float())
    counts = torch.tensor([sum(row.sampled) for row in rows], device=sums.device)
    return sums / counts[:, None]


def engine_encoder(router: RouterConfig, engine: GenerationEngine) -> Encode | None:
    """Prompt features from the engine, if rollouts reuse the prefix that it has encoded: appended text leaves the
    prompt as it is. Runs its own event loop in a thread, so it can be called from anywhere."""
    if router.conditioning != "append" or router.layers != [-1] or not isinstance(engine, PrefixEngine):
        return None

    async def read_all(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        return list(await asyncio.gather(*(engine.encode(prompt, pool=router.pool) for prompt in prompts)))

    def encode(prompts: Sequence[Sequence[int]]) -> Tensor:
        with ThreadPoolExecutor(1, thread_name_prefix="toolwise-router") as thread:
            return torch.stack(thread.submit(asyncio.run, read_all(prompts)).result())

    return encode


def feature_width(model: Any, layers: Sequence[int] = (-1,)) -> int:
    trunk = model.get_decoder()
    width = int(trunk.get_input_embeddings().weight.shape[1])
    return int(getattr(trunk.config, "hidden_size", width)) * len(layers)


def _layer_states(model: Any, packed: Any, layers: Sequence[int]) -> Tensor:
    """[T, width]: the states of the given layers (0: the first, -2: the last but one), concatenated."""
    inner = [layer for layer in layers if layer != -1]
    if not inner:
        return hidden_states(model, packed)
    if not can_share_prefixes(model):
        raise ModelError(f"{type(model).__name__} only gives its last hidden states: set router.layers to [-1]")
    copy = shared_copy(model)  # the hooks belong to modules that nothing else runs
    outputs: dict[int, Tensor] = {}

    def store(layer: int, module: Any, inputs: Any, output: Any) -> None:
        outputs[layer] = output[0] if isinstance(output, tuple) else output

    for layer in inner:
        block = copy.get_decoder().layers[layer]
        block._forward_hooks = block._forward_hooks.copy()  # otherwise shared with the original model
        block.register_forward_hook(partial(store, layer))
    last = hidden_states(copy, packed)
    return torch.cat([last if layer == -1 else outputs[layer].reshape(last.shape) for layer in layers], dim=-1)


class HeadAverage:
    """Running mean of heads and of their λ; empty until the first head is added."""

    def __init__(self) -> None:
        self.head: RouterHead | None = None
        self.multipliers: list[float] = []
        self.count = 0

    @torch.no_grad()
    def add(self, head: RouterHead, multipliers: Sequence[float]) -> None:
        self.count += 1
        if self.head is None:
            self.head, self.multipliers = copy.deepcopy(head), [float(multiplier) for multiplier in multipliers]
            return
        for mean, weight in zip(self.head.parameters(), head.parameters(), strict=True):
            mean.lerp_(weight, 1.0 / self.count)
        pairs = zip(self.multipliers, multipliers, strict=True)
        self.multipliers = [mean + (multiplier - mean) / self.count for mean, multiplier in pairs]

    def of(self, head: RouterHead, multipliers: Sequence[float]) -> tuple[RouterHead, Sequence[float]]:
        """The means if there are any, else the arguments."""
        return (head, multipliers) if self.head is None else (self.head, self.multipliers)

    def reset(self) -> None:
        self.head, self.multipliers, self.count = None, [], 0

    def state_dict(self) -> dict[str, Any]:
        if self.head is None:
            return {}
        return {"head": dict(self.head.named_parameters()), "multipliers": self.multipliers, "count": self.count}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], like: RouterHead) -> None:
        """`like` is a head with the same settings."""
        self.reset()
        if state:
            self.head = copy.deepcopy(like)
            for name, weight in self.head.named_parameters():
                weight.copy_(state["head"][name])
            self.multipliers, self.count = list(state["multipliers"]), int(state["count"])


class HeadPredictor:
    """`encode` computes prompt features with the trunk; by default a forward pass of `model`."""

    trunk: Sequence[Tensor] = ()
    """The weights of the trunk that are trained with the head; features depend on them."""

    def __init__(
        self, model: Any, head: RouterHead, *, micro_batch_tokens: int = 16_384, encode: Encode | None = None
    ) -> None:
        self.model = model
        self.head = head.to(model.device)
        self.micro_batch_tokens = micro_batch_tokens
        self.encode = encode or self._encode
        self._ahead = ReadAhead()
        self.average = HeadAverage()
        """Empty unless the head is trained."""

    @cached_property
    def _cpu_features(self) -> CpuFeatures:
        return CpuFeatures(self.model)

    def _encode(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        s = self.head.settings
        if not torch.is_grad_enabled() and self._reads_on_cpu(prompts):
            return self._cpu_features.read(self._cpu_features.plan(prompts, max_tokens=self.micro_batch_tokens))
        return prompt_features(self.model, prompts, pool=s.pool, layers=s.layers, max_tokens=self.micro_batch_tokens)

    def _reads_on_cpu(self, prompts: Sequence[Sequence[int]]) -> bool:
        s = self.head.settings
        return s.pool == "last" and s.layers == (-1,) and not self.trunk and self._cpu_features.reads(prompts)

    @torch.no_grad()
    def predict(
        self, prompts: Sequence[Sequence[int]], multipliers: Sequence[float] = (), *, averaged: bool = False
    ) -> list[RoutePrediction]:
        if not prompts:
            return []
        features = None if averaged else self._ahead.take(prompts)
        features = self.encode(prompts) if features is None else features
        return self._predict_from(prompts, features.detach(), multipliers, averaged)

    def plan_ahead(self, prompts: Sequence[Sequence[int]]) -> None:
        """These are the prompts that `predict` will be asked for next, for the head that is trained."""
        if prompts and self.encode == self._encode and self._reads_on_cpu(prompts) and has_free_core():
            plan = self._cpu_features.plan(prompts, max_tokens=self.micro_batch_tokens)
            self._ahead.plan(prompts, partial(self._cpu_features.read, plan))

    def read_ahead(self) -> None:
        """Begin to read the prompts that were planned, on a core that is free: the trunk will not change before they
        are asked for."""
        self._ahead.start()

    @torch.no_grad()
    def predict_encoded(
        self, prompt: Sequence[int], features: Tensor, multipliers: Sequence[float] = (), *, averaged: bool = False
    ) -> RoutePrediction:
        """Like `predict`, of one prompt whose features [width] are known."""
        return self._predict_from([prompt], features.detach()[None], multipliers, averaged)[0]

    def _predict_from(
        self, prompts: Sequence[Sequence[int]], features: Tensor, multipliers: Sequence[float], averaged: bool
    ) -> list[RoutePrediction]:
        head, used_multipliers = self.average.of(self.head, multipliers) if averaged else (self.head, multipliers)
        return [
            replace(prediction, head_inputs=(tuple(prompt), features[i] if not self.trunk else None))
            for i, (prompt, prediction) in enumerate(
                zip(prompts, predict_routes(head, features, used_multipliers), strict=True)
            )
        ]

    def prediction_state(self) -> dict[str, Any]:
        return {"head": dict(self.head.named_parameters()), "average": self.average.state_dict()}

    @torch.no_grad()
    def at_state(self, state: Mapping[str, Any]) -> HeadPredictor:
        head, tokens = copy.deepcopy(self.head), self.micro_batch_tokens
        other = HeadPredictor(self.model, head, micro_batch_tokens=tokens, encode=self.encode)
        other._copy_head_weights(state["head"], "the ticket has")
        other.average.load_state_dict(state["average"], head)
        return other

    @torch.no_grad()
    def load(self, folder: Any) -> dict[str, Any]:
        head, metadata = load_head(Path(folder))
        self._copy_head_weights(dict(head.named_parameters()), f"{folder} has a router with")
        self.average.reset()
        return metadata

    def _copy_head_weights(self, weights: Mapping[str, Tensor], whose: str) -> None:
        parameters = dict(self.head.named_parameters())
        if parameters.keys() != weights.keys() or any(parameters[k].shape != weights[k].shape for k in parameters):
            raise CheckpointError(f"{whose} a different head than the run: check [router]")
        for name, weight in parameters.items():
            weight.copy_(weights[name])
