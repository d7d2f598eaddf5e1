"""Samples tokens from hidden states: the model's head, temperature, and random numbers keyed by (request seed,
position).

A request's samples do not depend on the rest of the batch. Log-probs are the model's own after temperature, in fp32,
which is what the learner must reproduce; a logits mask changes which token is sampled, not its log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.engine.request import Request
from toolwise.errors import PolicyError
from toolwise.protocols import Sampling
from toolwise.untrusted.user_code import describe

MAX_LOGIT_ROWS = 256
"""Rows of logits computed at a time: vocabularies are large."""


class NaNLogitsError(PolicyError):
    """The model produced NaN, from which no token can be sampled."""

    def __init__(self) -> None:
        super().__init__("the model gives NaN: its weights are broken, go back to an earlier checkpoint")


def uniforms(seeds: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One uniform number in [0, 1) per (seed, position): splitmix64, twice."""
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state ^ (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def draw(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its log-prob after temperature; `allowed` masks the tokens."""
    logprobs = torch.log_softmax(_apply_temperature(logits, [s.temperature for s in samplings]), dim=-1)
    masked = logprobs if allowed is None else _mask_logprobs(logprobs, allowed)
    if not any(s.do_sample for s in samplings):
        tokens = masked.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    seeds = np.array([s.seed & 0xFFFF_FFFF_FFFF_FFFF for s in samplings], dtype=np.uint64)
    u = torch.from_numpy(uniforms(seeds, np.array(positions))).to(logits.device)
    # CPU sums accumulate in fp64 and round to fp32; elsewhere use fp64 throughout, so that rare tokens stay possible.
    probabilities = masked.exp() if logits.device.type == "cpu" else masked.double().exp()
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    # At most the next smaller float, so that rounding never selects a token of zero probability at the end.
    threshold = (u * total).to(total.dtype).minimum(torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    if not all(s.do_sample for s in samplings):
        greedy = torch.tensor([not s.do_sample for s in samplings], device=logits.device)
        tokens = torch.where(greedy, masked.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _mask_logprobs(logprobs: Tensor, allowed: Tensor) -> Tensor:
    """Log-probs of the allowed tokens, shifted per row as they may be too unlikely for fp32. Unmasked rows stay
    exact."""
    masked = logprobs.masked_fill(~allowed, -torch.inf)
    return masked - masked.amax(-1, keepdim=True).masked_fill(allowed.all(-1, keepdim=True), 0.0)


def _apply_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    logits = logits.float()
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits / torch.tensor(temperatures, device=logits.device)[:, None]


def sample(logits: Tensor, requests: Sequence[Request]) -> list[tuple[int, float]]:
    """A token and its log-prob for each request; sets the fault of requests that cannot get one."""
    allowed = _allowed(logits, requests) if any(r.logits_mask for r in requests) else None
    tokens, logprobs = draw(logits, [r.sampling for r in requests], [r.sampled for r in requests], allowed)
    samples = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    for request, (_, logprob) in zip(requests, samples, strict=True):
        if logprob != logprob:
            request.fault = NaNLogitsError()
    return samples


def _allowed(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Mask of allowed tokens: all True for a request without a mask, or whose mask fails (which sets its fault)."""
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    for row, request in enumerate(requests):
        if request.logits_mask is None:
            continue
        try:
            mask = request.logits_mask(request.tokens[request.prompt_length :])
            if mask is not None:
                # check it on its own device: no need to wait for the GPU
                mask = torch.as_tensor(mask, dtype=torch.bool)
                if not bool(mask.any()):
                    raise PolicyError("it allows no token")
                allowed[row] = mask.to(logits.device)
        except BaseException as fault:  # user code
            request.fault = PolicyError(f"the logits mask of a request failed: {describe(fault)}")
    return allowed


def score(logits: Tensor, targets: Sequence[int], temperature: float) -> tuple[list[float], list[float]]:
    """Log-prob of each target and the entropy of its distribution, after temperature, in fp32."""
    logprobs = torch.log_softmax(_apply_temperature(logits, [temperature] * len(targets)), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(targets, device=logits.device)[:, None]).squeeze(-1)
    # exp(-inf) * -inf is NaN, but an impossible token adds nothing.
    entropies = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    return chosen.tolist(), entropies.tolist()
