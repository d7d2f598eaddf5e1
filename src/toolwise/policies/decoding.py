"""Batched generation over a stock `transformers` model: prefill each distinct prompt once, then decode together.

Draws are keyed by (request seed, position), so a request's tokens do not depend on its companions, and log-probs are
taken after temperature in fp32: what the learner must reproduce.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from toolwise.errors import PolicyError
from toolwise.protocols import Generation, Sampling


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A cache layer with room to grow: a new token is written into place instead of copying all that came before.

    `_stores` hold the room, `keys` and `values` what is in use of it. Whoever selects, reorders or crops rows gives the
    layer other `keys`: the stores are then stale, whatever their shape, and are filled anew from what the layer holds.
    """

    room = 64

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self._stores: list[torch.Tensor] = [self.keys, self.values]
            self._in_use = self.keys
        held = self.keys.shape[2]
        length = held + key_states.shape[2]
        if length > self._stores[0].shape[2] or self.keys is not self._in_use:
            self._stores = [self._widened(held_states, length) for held_states in (self.keys, self.values)]
        for store, new in zip(self._stores, (key_states, value_states), strict=True):
            store[:, :, held:length] = new
        self.keys, self.values = (store[:, :, :length] for store in self._stores)
        self._in_use = self.keys
        return self.keys, self.values

    def _widened(self, states: torch.Tensor, length: int) -> torch.Tensor:
        rows, heads, held, size = states.shape
        store = states.new_empty(rows, heads, length + self.room, size)
        store[:, :, :held] = states
        return store


def roomy_cache(layers: int) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [RoomyLayer() for _ in range(layers)]
    return cache


def uniforms(seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One number in [0, 1) for each (seed, position): splitmix64, twice."""
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state ^ (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob after temperature."""
    temperature = torch.tensor([s.temperature for s in samplings], device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    greedy = torch.tensor([not s.do_sample for s in samplings], device=logits.device)
    tokens = logprobs.argmax(-1)
    if not bool(greedy.all()):
        seeds = np.array([s.seed & 0xFFFF_FFFF_FFFF_FFFF for s in samplings], dtype=np.uint64)
        u = torch.from_numpy(uniforms(seeds, np.full(len(seeds), position))).to(logits.device)
        cumulative = logprobs.double().exp().cumsum(-1)
        sampled = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True).squeeze(-1)
        tokens = torch.where(greedy, tokens, sampled.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


@torch.inference_mode()
def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    pad_id: int,
    policy_version: int,
) -> list[Generation]:
    """Continue every prompt until its stop token or its length; rows that are done leave the batch."""
    cache, mask, logits = _prefill(model, prompts, pad_id)
    device = logits.device
    ids = [array("i") for _ in prompts]
    logprobs = [array("f") for _ in prompts]
    stopped = [False] * len(prompts)
    active = list(range(len(prompts)))
    position = 0
    while active:
        tokens, chosen = draw(logits, [samplings[i] for i in active], position)
        position += 1
        kept = []
        for row, (i, token, logprob) in enumerate(zip(active, tokens.tolist(), chosen.tolist(), strict=True)):
            if math.isnan(logprob):
                raise PolicyError("the model gives NaN: its weights are broken, go back to an earlier checkpoint")
            ids[i].append(token)
            logprobs[i].append(logprob)
            stopped[i] = token in samplings[i].stop_token_ids
            if not stopped[i] and position < samplings[i].max_new_tokens:
                kept.append(row)
        if not kept:
            break
        if len(kept) < len(active):
            index = torch.tensor(kept, device=device)
            cache.batch_select_indices(index)
            mask, tokens = mask[index], tokens[index]
            active = [active[row] for row in kept]
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
        out = model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        logits = out.logits[:, -1]
    return [
        Generation(ids[i], logprobs[i], "stop" if stopped[i] else "length", policy_version) for i in range(len(prompts))
    ]


def _prefill(
    model: Any, prompts: Sequence[Sequence[int]], pad_id: int
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
    """Run each distinct prompt once, left-padded, and lay the result out for every request."""
    distinct = list(dict.fromkeys(tuple(p) for p in prompts))
    width = max(map(len, distinct))
    device = next(model.parameters()).device
    padded = [[pad_id] * (width - len(p)) + list(p) for p in distinct]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=device)
    cache = roomy_cache(model.config.num_hidden_layers)
    out = model(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits = out.logits[:, -1]
    if len(distinct) < len(prompts):
        row_of = {p: row for row, p in enumerate(distinct)}
        index = torch.tensor([row_of[tuple(p)] for p in prompts], device=device)
        cache.batch_select_indices(index)
        mask, logits = mask[index], logits[index]
    return cache, mask, logits
