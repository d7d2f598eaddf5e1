"""Samples tokens from hidden states: the model's head, temperature, and random numbers keyed by (request seed,
position).

A request's samples do not depend on the rest of the batch. Log-probs are the model's own after temperature, in fp32,
which is what the learner must reproduce; a logits mask, top_p and top_k change which token is sampled, not its
log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.engine.grammar import GrammarError
from toolwise.engine.request import Request, ServingOptions
from toolwise.errors import PolicyError
from toolwise.protocols import Sampling
from toolwise.untrusted.user_code import describe

NUCLEUS_CANDIDATES = 512
"""Tokens looked at first for top_p: mostly they suffice, and sorting a vocabulary takes long."""
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
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    allowed: Tensor | None = None,
    options: Sequence[ServingOptions] = (),
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its log-prob after temperature; `allowed` masks the tokens, `options` truncate the
    distribution."""
    logprobs = model_logprobs(logits, samplings)
    return draw_from(logprobs, samplings, positions, allowed, options)


def model_logprobs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The model's own log-probs after temperature, in fp32."""
    return torch.log_softmax(_apply_temperature(logits, [s.temperature for s in samplings]), dim=-1)


def draw_from(
    logprobs: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    allowed: Tensor | None = None,
    options: Sequence[ServingOptions] = (),
) -> tuple[Tensor, Tensor]:
    """`draw` from log-probs."""
    masked = logprobs if allowed is None else _mask_logprobs(logprobs, allowed)
    if any(option.truncates for option in options):
        masked = _truncate(masked, options)
    if not any(s.do_sample for s in samplings):
        tokens = masked.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    seeds = np.array([s.seed & 0xFFFF_FFFF_FFFF_FFFF for s in samplings], dtype=np.uint64)
    u = torch.from_numpy(uniforms(seeds, np.array(positions))).to(logprobs.device)
    # CPU sums accumulate in fp64 and round to fp32; elsewhere use fp64 throughout, so that rare tokens stay possible.
    probabilities = masked.exp() if logprobs.device.type == "cpu" else masked.double().exp()
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    # At most the next smaller float, so that rounding never selects a token of zero probability at the end.
    threshold = (u * total).to(total.dtype).minimum(torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    tokens = tokens.clamp_(max=logprobs.shape[-1] - 1)
    if not all(s.do_sample for s in samplings):
        greedy = torch.tensor([not s.do_sample for s in samplings], device=logprobs.device)
        tokens = torch.where(greedy, masked.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _mask_logprobs(logprobs: Tensor, allowed: Tensor) -> Tensor:
    """Log-probs of the allowed tokens, shifted per row as they may be too unlikely for fp32. Unmasked rows stay
    exact."""
    masked = logprobs.masked_fill(~allowed, -torch.inf)
    return masked - masked.amax(-1, keepdim=True).masked_fill(allowed.all(-1, keepdim=True), 0.0)


def _truncate(logprobs: Tensor, options: Sequence[ServingOptions]) -> Tensor:
    """-inf outside the likeliest tokens of each row that truncates; the others stay exact."""
    rows = [row for row, option in enumerate(options) if option.truncates]
    size, part = logprobs.shape[-1], logprobs[rows]
    top_k = [options[row].top_k or size for row in rows]
    top_p = torch.tensor([options[row].top_p for row in rows], device=logprobs.device)
    count = min(size, max(max(top_k) if max(top_k) < size else 0, NUCLEUS_CANDIDATES))
    total = part.double().exp().sum(-1)
    while True:
        values, ids = part.topk(count, dim=-1)
        ranks = torch.arange(count, device=logprobs.device)
        in_k = ranks < torch.tensor(top_k, device=logprobs.device)[:, None]
        probs = values.double().exp().masked_fill(~in_k, 0.0)
        # Shares of all that top_k leaves, which are the candidates if it leaves no more than these.
        by_k = torch.tensor([k <= count for k in top_k], device=logprobs.device)
        mass = torch.where(by_k, probs.sum(-1), total)[:, None]
        before = probs.cumsum(-1) - probs
        complete = by_k | (probs.sum(-1) >= top_p * mass.squeeze(-1)) & (top_p < 1)
        if count == size or bool(complete.all()):
            break
        count = size
    keep = in_k & (before < top_p[:, None] * mass)
    keep[:, 0] = True
    truncated = torch.full_like(part, -torch.inf).scatter_(-1, ids, values.masked_fill(~keep, -torch.inf))
    result = logprobs.clone()
    result[rows] = truncated
    return result


def top_tokens(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of each row with their log-probs, best first."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def _apply_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    logits = logits.float()
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits / torch.tensor(temperatures, device=logits.device)[:, None]


def sample(logits: Tensor, requests: Sequence[Request], new: Sequence[Sequence[int]] = ()) -> list[tuple[int, float]]:
    """A token and its log-prob for each request; sets the fault of requests that cannot get one. `new`: tokens of each
    that came after its own."""
    new = new or [()] * len(requests)
    allowed = _allowed(logits, requests, new) if any(r.logits_mask for r in requests) else None
    samplings, options = [r.sampling for r in requests], [r.options for r in requests]
    all_logprobs = model_logprobs(logits, samplings)
    positions = [request.sampled + len(more) for request, more in zip(requests, new, strict=True)]
    tokens, logprobs = draw_from(all_logprobs, samplings, positions, allowed, options)
    samples = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    for request, (_, logprob) in zip(requests, samples, strict=True):
        if logprob != logprob:
            request.fault = NaNLogitsError()
    reported = [row for row, option in enumerate(options) if option.top_logprobs]
    tops = top_tokens(all_logprobs[reported], max(o.top_logprobs for o in options)) if reported else []
    for row, top in zip(reported, tops, strict=True):
        requests[row].top_logprobs.append(top[: options[row].top_logprobs])
    return samples


def _allowed(logits: Tensor, requests: Sequence[Request], new: Sequence[Sequence[int]]) -> Tensor:
    """Mask of allowed tokens: all True for a request without a mask, or whose mask fails (which sets its fault)."""
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    for row, request in enumerate(requests):
        if request.logits_mask is None:
            continue
        try:
            mask = request.logits_mask([*request.tokens[request.prompt_length :], *new[row]])
            if mask is not None:
                # check it on its own device: no need to wait for the GPU
                mask = torch.as_tensor(mask, dtype=torch.bool)
                if not bool(mask.any()):
                    raise PolicyError("it allows no token")
                allowed[row] = mask.to(logits.device)
        except GrammarError as fault:  # it became too complex: the error of who asked for it
            request.fault = GrammarError(f"the grammar of a request failed: {fault}")
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
