"""Predictions of a router's head: the trunk computes the features of prompts, the head the routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolwise.errors import CheckpointError
from toolwise.routing.head.average import HeadAverage
from toolwise.routing.head.features import prompt_features
from toolwise.routing.head.head import RouterHead, load_head, predict_routes
from toolwise.routing.samples import RoutePrediction

Encode = Callable[[Sequence[Sequence[int]]], Tensor]


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
        self.average = HeadAverage()
        """Empty unless the head is trained."""
        self.prefills = 0
        """Number of prompts encoded for predictions."""

    def _encode(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        s = self.head.settings
        return prompt_features(self.model, prompts, pool=s.pool, layers=s.layers, max_tokens=self.micro_batch_tokens)

    @torch.no_grad()
    def predict(
        self, prompts: Sequence[Sequence[int]], multipliers: Sequence[float] = (), *, averaged: bool = False
    ) -> list[RoutePrediction]:
        if not prompts:
            return []
        features = self.encode(prompts).detach()
        self.prefills += len(prompts)
        head, used_multipliers = self.average.of(self.head, multipliers) if averaged else (self.head, multipliers)
        return [
            replace(prediction, head_inputs=(tuple(prompt), features[i] if not self.trunk else None))
            for i, (prompt, prediction) in enumerate(
                zip(prompts, predict_routes(head, features, used_multipliers), strict=True)
            )
        ]

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
