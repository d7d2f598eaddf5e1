"""What a forward pass gave, to each its own: a token, scores or a hidden state; and who is done with that."""

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
from toolwise.untrusted.user_code import describe

Decode = Callable[[Sequence[int]], str]
_MAX_CHARACTER_TOKENS = 8
"""Tokens that may stand for one character beyond those that a stop string itself can have."""


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
        """Those who are done, each with its result or its fault. `before_sync` is asked before a device is waited for,
        when what is in the plan is in the tree: who else, with nothing left to compute, is to get a result as well."""
        states, rows = _add_cached_states(plan, states, rows)
        for request, count in plan.items():
            self._commit(request, count)
            if request.has_followers and not request.sampled and not request.pending and request in rows:
                request.has_followers = False
                assert request.lease is not None
                self.blocks.share_tail(request.lease, request.tokens, states[rows[request][-1]].clone())
        more = before_sync()
        states, rows = _add_cached_states(more, states, rows)
        plan = plan | more
        drawing = [r for r in plan if r.kind == "generate" and r in rows]
        if drawing:
            self._draw(drawing, states[[rows[r][-1] for r in drawing]], version)
        for request in plan:
            if request.kind != "generate" and request in rows:
                here = states[rows[request]]
                if request.kind == "score":
                    self._score(request, here)
                else:
                    self._read(request, here)
        return [r for r in plan if r.fault is not None or self._done(r)]

    def process_multi_step(
        self, requests: Sequence[Request], tokens: Sequence[list[int]], logprobs: Sequence[list[float]], version: int
    ) -> list[Request]:
        """As `process_step`, of many steps at once."""
        for request, new, figures in zip(requests, tokens, logprobs, strict=True):
            assert request.lease is not None
            self.decoded_tokens += len(new) - (not request.sampled)
            self.prefilled_tokens += not request.sampled
            held = request.held + len(new)
            request.tokens.extend(new)
            request.logprobs.extend(figures)
            request.versions.extend([version] * len(new))
            request.stopped = new[-1] in request.sampling.stop_token_ids
            if math.isnan(sum(figures)):
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
        assert request.lease is not None
        # A reply is computed token by token, which rounds otherwise than a prompt would: shared by the block alone
        # where results must be the same to the bit.
        up_to = request.prompt_length if self.blocks.full_blocks_only else None
        self.blocks.commit(request.lease, request.tokens, request.held + count, share_up_to=up_to)

    def _draw(self, requests: list[Request], states: Tensor, version: int) -> None:
        drawn = sampler.sample(self.head(states), requests)
        for request, (token, logprob) in zip(requests, drawn, strict=True):
            if request.fault is None:
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.versions.append(version)
                request.stopped = token in request.sampling.stop_token_ids or self._has_stop_string(request)

    def _has_stop_string(self, request: Request) -> bool:
        if not request.stop_strings:
            return False
        assert self.decode is not None
        longest = max(len(stop.encode()) for stop in request.stop_strings) + _MAX_CHARACTER_TOKENS
        try:
            text = self.decode(request.tokens[max(request.prompt_length, len(request.tokens) - longest) :])
        except BaseException as fault:  # somebody else's code
            request.fault = PolicyError(f"the text of a request cannot be read: {describe(fault)}")
            return False
        return any(stop in text for stop in request.stop_strings)

    def _score(self, request: Request, states: Tensor) -> None:
        for few in torch.split(states, sampler.MAX_LOGIT_ROWS):
            begun = len(request.logprobs)
            targets = request.targets[begun : begun + len(few)]
            logprobs, entropies = sampler.score(self.head(few), targets, request.sampling.temperature)
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
    """Hidden states that the tree had stand before those that were computed."""
    stored: list[Any] = []
    for request in plan:
        if request.lease is not None and request.lease.hidden is not None:
            rows[request] = [len(states) + len(stored), *rows.get(request, ())]
            stored.append(request.lease.hidden)
            request.lease.hidden = None
    if stored:
        found = torch.stack(stored)
        states = torch.cat([states, found]) if len(states) else found
    return states, rows
