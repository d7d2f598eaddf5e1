"""Turns the output of a forward pass into tokens, scores or hidden states per request, and finds those that are
done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolwise.engine import sampler
from toolwise.engine.blocks import BlockManager
from toolwise.engine.request import Request
from toolwise.engine.scheduler import Plan
from toolwise.errors import PolicyError
from toolwise.rollout.stop_strings import has_stop_string
from toolwise.untrusted.user_code import describe

Decode = Callable[[Sequence[int]], str]


class OutputProcessor:
    def __init__(self, blocks: BlockManager, head: Callable[[Tensor], Tensor], decode: Decode | None) -> None:
        self.blocks, self.head, self.decode = blocks, head, decode
        self.prefilled_tokens = self.decoded_tokens = 0

    @torch.inference_mode()
    def process_step(
        self,
        plan: Plan,
        states: Tensor,
        rows: dict[Request, list[int]],
        version: int,
        before_sync: Callable[[], Plan] = dict,
    ) -> list[Request]:
        """Returns the finished requests, each with its result or fault. `before_sync` runs before the device is waited
        for, when the plan's prompts are in the tree: it returns further requests that have nothing left to compute and
        get a result too."""
        states, rows = _add_cached_states(plan, states, rows)
        for request, count in plan.items():
            self._commit(request, count)
            if request.has_followers and not request.sampled and not request.pending and request in rows:
                request.has_followers = False
                self.blocks.share_tail(request.lease, request.tokens, states[rows[request][-1]].clone())
        followers = before_sync()
        states, rows = _add_cached_states(followers, states, rows)
        plan = plan | followers
        sampling = [r for r in plan if r.kind == "generate" and r in rows]
        if sampling:
            self._sample(sampling, states[[rows[r][-1] for r in sampling]], version)
        for request in plan:
            if request.kind != "generate" and request in rows:
                request_states = states[rows[request]]
                if request.kind == "score":
                    self._score(request, request_states)
                else:
                    self._read(request, request_states)
        return [r for r in plan if r.fault is not None or self._done(r)]

    def process_multi_step(
        self, requests: Sequence[Request], tokens: Sequence[list[int]], logprobs: Sequence[list[float]], version: int
    ) -> list[Request]:
        """Like `process_step`, for many steps at once."""
        for request, new_tokens, new_logprobs in zip(requests, tokens, logprobs, strict=True):
            self.decoded_tokens += len(new_tokens) - (not request.sampled)
            self.prefilled_tokens += not request.sampled
            held = request.held + len(new_tokens)
            request.tokens.extend(new_tokens)
            request.logprobs.extend(new_logprobs)
            request.versions.extend([request.version_of_next(version)] * len(new_tokens))
            request.stopped = new_tokens[-1] in request.sampling.stop_token_ids or self.has_stop_string(request)
            if math.isnan(sum(new_logprobs)):
                request.fault = sampler.NaNLogitsError()
            self.blocks.commit(request.lease, request.tokens, held)
        return [r for r in requests if r.fault is not None or self._done(r)]

    def _commit(self, request: Request, count: int) -> None:
        if not count:
            return
        if request.sampled and request.pending == 1:
            self.decoded_tokens += 1
        else:
            self.prefilled_tokens += count
        # Reply tokens are computed one by one, which rounds differently than a prompt does: do not share them when
        # results must be bitwise reproducible.
        up_to = request.prompt_length if self.blocks.full_blocks_only else None
        self.blocks.commit(request.lease, request.tokens, request.held + count, share_up_to=up_to)

    def _sample(self, requests: list[Request], states: Tensor, version: int) -> None:
        samples = sampler.sample(self.head(states), requests)
        for request, (token, logprob) in zip(requests, samples, strict=True):
            if request.fault is None:
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.versions.append(request.version_of_next(version))
                request.stopped = token in request.sampling.stop_token_ids or self.has_stop_string(request)

    def has_stop_string(self, request: Request, new: Sequence[int] = ()) -> bool:
        """Whether the last token, of `new` if there are any, completes a stop string; sets the fault of a request whose
        tokens cannot be decoded."""
        if not request.stop_strings:
            return False
        assert self.decode is not None
        try:
            return has_stop_string(self.decode, request.tokens, new, request.stop_strings, request.prompt_length)
        except BaseException as fault:  # user code
            request.fault = PolicyError(f"the tokens of a request cannot be decoded: {describe(fault)}")
            return False

    def _score(self, request: Request, states: Tensor) -> None:
        for chunk in torch.split(states, sampler.MAX_LOGIT_ROWS):
            start = len(request.logprobs)
            targets = request.targets[start : start + len(chunk)]
            logprobs, entropies = sampler.score(self.head(chunk), targets, request.sampling.temperature)
            request.logprobs.extend(logprobs)
            request.entropies.extend(entropies)
            if any(value != value for value in logprobs):
                request.fault = sampler.NaNLogitsError()

    def _read(self, request: Request, states: Tensor) -> None:
        if not request.mean:
            request.hidden = states[-1].clone()
        else:
            total = states.float().sum(0)
            request.hidden = total if request.hidden is None else request.hidden + total

    def _done(self, request: Request) -> bool:
        if request.kind == "generate":
            return request.stopped or request.sampled >= request.sampling.max_new_tokens
        return request.pending == 0


def _add_cached_states(
    plan: Plan, states: Tensor, rows: dict[Request, list[int]]
) -> tuple[Tensor, dict[Request, list[int]]]:
    """Add the hidden states that came from the cache to the computed ones."""
    cached_states: list[Any] = []
    for request in plan:
        if request.lease.hidden is not None:
            rows[request] = [len(states) + len(cached_states), *rows.get(request, ())]
            cached_states.append(request.lease.hidden)
            request.lease.hidden = None
    if cached_states:
        stacked = torch.stack(cached_states)
        states = torch.cat([states, stacked]) if len(states) else stacked
    return states, rows
