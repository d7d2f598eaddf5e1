"""From hidden states to tokens: the model's head, temperature, and draws keyed by (request seed, position).

A request's draws do not depend on its companions. Log-probs are the model's own after temperature, in fp32, which is
what the learner must reproduce; a logits mask changes what is drawn and not what its log-prob is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.engine.request import Request
from toolwise.errors import PolicyError
from toolwise.protocols import Sampling
from toolwise.untrusted.user_code import describe

MAX_LOGIT_ROWS = 256
"""Rows of logits that exist at a time: vocabularies are large."""


class NaNLogitsError(PolicyError):
    """Hidden states that no token can be drawn from."""

    def __init__(self) -> None:
        super().__init__("the model gives NaN: its weights are broken, go back to an earlier checkpoint")


def logits_head(model: Any, fixed_rows: int | None = None) -> Callable[[Tensor], Tensor]:
    """From hidden states to logits, with what some families do to them after the projection.

    `fixed_rows`: as many rows at a time, padded: a product's rounding depends on its shape.
    """
    config = model.get_decoder().config
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def logits(states: Tensor) -> Tensor:
        projection = model.get_output_embeddings()  # looked up here: an adapter may have taken its place
        found: Tensor = projection(states) if fixed_rows is None else _in_fixed_rows(projection, states, fixed_rows)
        found = found if factor == 1.0 else found * factor
        return found if cap is None else torch.tanh(found / cap) * cap

    return logits


def _in_fixed_rows(projection: Callable[[Tensor], Tensor], states: Tensor, rows: int) -> Tensor:
    parts = []
    for few in torch.split(states, rows):
        padded = torch.cat([few, few.new_zeros(rows - len(few), few.shape[1])])
        parts.append(projection(padded)[: len(few)])
    return torch.cat(parts)


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


def draw(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token a row and its log-prob after temperature; `allowed`: tokens that may be drawn, a row each."""
    logprobs = torch.log_softmax(_apply_temperature(logits, [s.temperature for s in samplings]), dim=-1)
    drawable = logprobs if allowed is None else _mask_logprobs(logprobs, allowed)
    if not any(s.do_sample for s in samplings):
        tokens = drawable.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    seeds = np.array([s.seed & 0xFFFF_FFFF_FFFF_FFFF for s in samplings], dtype=np.uint64)
    u = torch.from_numpy(uniforms(seeds, np.array(positions))).to(logits.device)
    # Sums are taken in fp64 and rounded to fp32 on a CPU; elsewhere fp64 throughout keeps rare tokens possible.
    kept = drawable.exp() if logits.device.type == "cpu" else drawable.double().exp()
    cumulative = kept.cumsum(-1)
    goal = (u * cumulative[:, -1]).to(cumulative.dtype).minimum(_previous_float(cumulative[:, -1]))
    tokens = torch.searchsorted(cumulative, goal[:, None], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    if not all(s.do_sample for s in samplings):
        greedy = torch.tensor([not s.do_sample for s in samplings], device=logits.device)
        tokens = torch.where(greedy, drawable.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _mask_logprobs(logprobs: Tensor, allowed: Tensor) -> Tensor:
    """What may be drawn, up to a factor a row: all that is left may be too unlikely for fp32. Whole rows stay exact."""
    kept = logprobs.masked_fill(~allowed, -torch.inf)
    return kept - kept.amax(-1, keepdim=True).masked_fill(allowed.all(-1, keepdim=True), 0.0)


def _previous_float(total: Tensor) -> Tensor:
    """The next number below, so that rounding never draws a token of no probability after the last one that has any."""
    return torch.nextafter(total, torch.zeros_like(total))


def _apply_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    logits = logits.float()
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits / torch.tensor(temperatures, device=logits.device)[:, None]


def sample(logits: Tensor, requests: Sequence[Request]) -> list[tuple[int, float]]:
    """A token and its log-prob for each request; one that cannot have any gets a fault of its own."""
    allowed = _allowed(logits, requests) if any(r.logits_mask for r in requests) else None
    tokens, logprobs = draw(logits, [r.sampling for r in requests], [r.sampled for r in requests], allowed)
    drawn = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    for request, (_, logprob) in zip(requests, drawn, strict=True):
        if logprob != logprob:
            request.fault = NaNLogitsError()
    return drawn


def _allowed(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Rows of True where a request has no mask, or one that fails: the fault is the request's own."""
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    for row, request in enumerate(requests):
        if request.logits_mask is None:
            continue
        try:
            may = request.logits_mask(request.tokens[request.prompt_length :])
            if may is not None:
                may = torch.as_tensor(may, dtype=torch.bool)  # where it is: a CPU need not wait for a GPU to look at it
                if not bool(may.any()):
                    raise PolicyError("it allows no token at all")
                allowed[row] = may.to(logits.device)
        except BaseException as fault:  # somebody else's code
            request.fault = PolicyError(f"the logits mask of a request failed: {describe(fault)}")
    return allowed


def score(logits: Tensor, targets: Sequence[int], temperature: float) -> tuple[list[float], list[float]]:
    """Log-prob of each target and the entropy of what it would be drawn from; after temperature, in fp32."""
    logprobs = torch.log_softmax(_apply_temperature(logits, [temperature] * len(targets)), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(targets, device=logits.device)[:, None]).squeeze(-1)
    # exp(-inf) * -inf is nan, and a token that cannot come adds nothing.
    entropies = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    return chosen.tolist(), entropies.tolist()
