"""Batched generation with any unmodified `transformers` model: prefill each distinct prompt once, decode together.

For models that the engine does not support, and for `rollout.engine = "transformers"`. Tokens are sampled as in the
engine.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from toolwise.engine.results import Decode
from toolwise.engine.sampler import draw
from toolwise.errors import ContextFullError, PolicyError
from toolwise.models.attention_layers import state_difference
from toolwise.models.decoder_layers import longrope_limit
from toolwise.models.merged_weights import merged_copy
from toolwise.protocols import Generation, GenerationEngine, Sampling
from toolwise.rollout.stop_strings import has_stop_string
from toolwise.untrusted.user_code import describe

_PendingRequest = tuple[Sequence[int], Sampling, Future[Generation]]


class BatchGenerator(GenerationEngine):
    """Requests that wait at the same time become one batch; later ones wait for the next. Requests may come from any
    event loop: a single thread serves them all."""

    def __init__(self, model: Any, pad_id: int, max_batch: int, decode: Decode | None = None) -> None:
        """`decode` is for stop strings."""
        self.model, self.pad_id, self.max_batch, self.decode = model, pad_id, max_batch, decode
        self.longest = longrope_limit(getattr(model, "config", None))
        self.version = 0
        self.batch_wait_s = 0.002
        self._waiting: list[_PendingRequest] = []
        self._lock = threading.Lock()
        self._working = False
        # A separate thread: tools that hang in the loop's default executor must not block generation.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolwise-generate")

    def weights_changed(self, version: int) -> None:
        self.version = version

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        length = len(token_ids) + sampling.max_new_tokens
        if self.longest is not None and length > self.longest:
            raise ContextFullError(
                f"a prompt of {len(token_ids)} tokens and {sampling.max_new_tokens} new ones are more than "
                f"{self.longest}, beyond which this model's rope (longrope) has other angles: shorten the prompt or "
                "lower rollout.max_new_tokens"
            )
        future: Future[Generation] = Future()
        with self._lock:
            self._waiting.append((token_ids, sampling, future))
            start, self._working = not self._working, True
        if start:
            self._thread.submit(self._serve)
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        """Process waiting requests in batches until there are none."""
        while batch := self._next_batch():
            prompts, samplings, futures = zip(*batch, strict=True)
            results: Sequence[Generation | PolicyError]
            try:
                results = generate_batch(
                    self.model,
                    prompts,
                    samplings,
                    pad_id=self.pad_id,
                    policy_version=self.version,
                    decode=self.decode,
                )
            except BaseException as fault:  # fail every request of the batch; none may wait forever
                results = [PolicyError(f"generation failed: {describe(fault)}")] * len(batch)
            for future, result in zip(futures, results, strict=True):
                if not future.set_running_or_notify_cancel():
                    continue
                if isinstance(result, PolicyError):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next_batch(self) -> list[_PendingRequest]:
        """Wait while more requests keep arriving, then take a batch. Generating it takes far longer than the wait."""
        count = -1
        while count < len(self._waiting) < self.max_batch:
            count = len(self._waiting)
            time.sleep(self.batch_wait_s)
        with self._lock:
            waiting = [request for request in self._waiting if not request[2].cancelled()]
            batch, self._waiting = waiting[: self.max_batch], waiting[self.max_batch :]
            self._working = bool(batch)
        return batch


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A cache layer with spare capacity: a new token is written in place instead of copying the whole cache.

    `_buffers` hold the allocated memory, `keys` and `values` are views of the part in use. Selecting, reordering or
    cropping rows gives the layer other `keys`: the buffers are then stale, whatever their shape, and are refilled.
    """

    spare_tokens = 64

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self._buffers: list[torch.Tensor] = [self.keys, self.values]
            self._in_use = self.keys
        used = self.keys.shape[2]
        length = used + key_states.shape[2]
        if length > self._buffers[0].shape[2] or self.keys is not self._in_use:
            self._buffers = [self._grow(states, length) for states in (self.keys, self.values)]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, used:length] = new
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
        self._in_use = self.keys
        return self.keys, self.values

    def _grow(self, states: torch.Tensor, length: int) -> torch.Tensor:
        rows, heads, used, size = states.shape
        buffer = states.new_empty(rows, heads, length + self.spare_tokens, size)
        buffer[:, :, :used] = states
        return buffer


@torch.inference_mode()
def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    pad_id: int,
    policy_version: int,
    decode: Decode | None = None,
) -> list[Generation]:
    """Continue every prompt until a stop token, a stop string or its maximum length; finished rows leave the batch.

    Prompts of different lengths are padded on the left; a model with recurrent layers, which would read the padding,
    runs those of each length apart.
    """
    stock = StockForward(merged_copy(model))
    check_cache(stock)
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt) if stock.recurrent else 0, []).append(i)
    results: dict[int, Generation] = {}
    for members in by_length.values():
        some, theirs = [prompts[i] for i in members], [samplings[i] for i in members]
        results |= zip(members, _generate(stock, some, theirs, pad_id, policy_version, decode), strict=True)
    return [results[i] for i in range(len(prompts))]


class StockForward:
    """The model's own forward pass with a cache, called with the arguments that it has."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        names = inspect.signature(model.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        known = [name for name in ("past_key_values", "cache_params") if name in names]
        self.cache_name = known[0] if known else "past_key_values"
        if not known and not takes_all:
            raise PolicyError(
                f"{type(model).__name__} does not use transformers' cache, so it cannot generate here: use another "
                'model, or rollout.engine = "vllm"'
            )
        self.options = {name for name in ("position_ids", "logits_to_keep") if takes_all or name in names}
        self.cache = DynamicCache(config=model.config)
        self.recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.cache.layers)

    def start(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        # A layer that keeps only its sliding window would need its mask cut to that window.
        plain = (DynamicLayer, DynamicSlidingWindowLayer)
        self.cache.layers = [PreallocatedLayer() if type(layer) in plain else layer for layer in self.cache.layers]

    def select(self, rows: torch.Tensor) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reorder_cache(rows)
            else:
                layer.batch_select_indices(rows)

    def logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] after the last of the new tokens [rows, tokens]; `mask` includes those in the cache."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"position_ids": positions, "logits_to_keep": 1}
        out = self.model(
            input_ids=ids,
            attention_mask=None if self.recurrent else mask,  # without padding; recurrent layers expect none then
            use_cache=True,
            **{self.cache_name: self.cache},
            **{name: options[name] for name in self.options},
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


_CHECKED: Any = WeakIdKeyDictionary()
"""First parameters of models whose cache was checked."""


def check_cache(stock: StockForward) -> None:
    """Raise if a few tokens, computed one by one over the cache, give other logits than the model's forward pass: some
    models keep their state elsewhere. Checked once per model, by running it."""
    first = next(stock.model.parameters())
    if first in _CHECKED:
        return
    vocabulary = int(stock.model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.tensor([[(11 * i + 3) % vocabulary for i in range(6)]], device=stock.device)
    stock.start()
    lengths = range(3, ids.shape[1] + 1)
    found = [stock.logits(ids[:, 0 if n == 3 else n - 1 : n], torch.ones_like(ids[:, :n])) for n in lengths]
    expected = stock.model(input_ids=ids, use_cache=False).logits[0, 2:]
    if not bool(expected.isfinite().all()):
        return  # broken weights have an error of their own
    difference = state_difference(torch.cat(found), expected)
    if difference is not None:
        raise PolicyError(
            f"{type(stock.model).__name__} gives other logits over transformers' cache than without ({difference}), so "
            'it cannot generate here: use another model, or rollout.engine = "vllm"'
        )
    _CHECKED[first] = True


def _generate(
    stock: StockForward,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    pad_id: int,
    policy_version: int,
    decode: Decode | None,
) -> list[Generation]:
    if decode is None and any(sampling.stop_strings for sampling in samplings):
        raise PolicyError("stop strings need a decode function")
    mask, logits = _prefill(stock, prompts, pad_id)
    device = logits.device
    ids = [array("i") for _ in prompts]
    logprobs = [array("f") for _ in prompts]
    stopped = [False] * len(prompts)
    active = list(range(len(prompts)))
    position = 0
    while active:
        tokens, chosen = draw(logits, [samplings[i] for i in active], [position] * len(active))
        position += 1
        remaining = []
        for row, (i, token, logprob) in enumerate(zip(active, tokens.tolist(), chosen.tolist(), strict=True)):
            if math.isnan(logprob):
                raise PolicyError(
                    "the model's log-probs are NaN: its weights are broken, go back to an earlier checkpoint"
                )
            ids[i].append(token)
            logprobs[i].append(logprob)
            stopped[i] = token in samplings[i].stop_token_ids or (
                decode is not None and has_stop_string(decode, ids[i], (), samplings[i].stop_strings)
            )
            if not stopped[i] and position < samplings[i].max_new_tokens:
                remaining.append(row)
        if not remaining:
            break
        if len(remaining) < len(active):
            index = torch.tensor(remaining, device=device)
            stock.select(index)
            mask, tokens = mask[index], tokens[index]
            active = [active[row] for row in remaining]
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
        logits = stock.logits(tokens[:, None], mask)
    return [
        Generation(ids[i], logprobs[i], "stop" if stopped[i] else "length", policy_version) for i in range(len(prompts))
    ]


def _prefill(stock: StockForward, prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run each distinct prompt once, left-padded, and expand the result to one row per request."""
    distinct = list(dict.fromkeys(tuple(p) for p in prompts))
    width = max(map(len, distinct))
    device = stock.device
    padded = [[pad_id] * (width - len(p)) + list(p) for p in distinct]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=device)
    stock.start()
    logits = stock.logits(torch.tensor(padded, device=device), mask)
    if len(distinct) < len(prompts):
        row_of = {p: row for row, p in enumerate(distinct)}
        index = torch.tensor([row_of[tuple(p)] for p in prompts], device=device)
        stock.select(index)
        mask, logits = mask[index], logits[index]
    return mask, logits
