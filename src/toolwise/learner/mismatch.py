"""Train–inference mismatch: checks in every update, before any weight moves, that policy and learner compute the same
log-probs for the same tokens. If they do not, training silently optimises the wrong objective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from toolwise.config.schema import Reaction
from toolwise.errors import ToolwiseError
from toolwise.learner import distributed

log = logging.getLogger("toolwise.learner")

Cause = Literal["stale weights", "temperature", "top-p or top-k", "template", "precision", "other weights"]

MAX_GAP_FP32 = 1e-3
MEAN_GAP_HALF = 0.05
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)


class MismatchError(ToolwiseError):
    """Policy and learner disagree; `cause` is the likely reason."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the check compares. Tensors have one entry per token; `gaps` are the learner's log-probs minus the
    policy's."""

    gaps: Tensor
    rows: Tensor
    versions: Tensor
    """Version of the policy that sampled the token, −1 if unknown."""
    version: int
    """The learner's version."""
    temperature: float
    probe: Callable[[float], float]
    """Mean absolute gap if the learner computed its log-probs at the given temperature."""


def check_logprobs(evidence: Evidence, dtype: torch.dtype, reaction: Reaction) -> dict[str, float]:
    """Return the gap metrics, none if there was nothing to compare. A gap above the limit for this precision raises an
    error or logs a warning."""
    gaps = evidence.gaps.abs()
    device = gaps.device
    total, count = distributed.sum_over_ranks([float(gaps.sum()), float(len(gaps))], device)
    [largest] = distributed.max_over_ranks([float(gaps.max()) if len(gaps) else 0.0], device)
    mean = total / max(count, 1.0)
    half = torch.finfo(dtype).bits < 32
    gap, limit, kind = (mean, MEAN_GAP_HALF, "mean") if half else (largest, MAX_GAP_FP32, "largest")
    if reaction != "off" and not gap <= limit:
        cause, advice = diagnose(evidence) if len(gaps) else ("other weights", "see the logs of the other processes")
        message = (
            f"{cause}: policy and learner disagree on the log-probs of the same tokens ({kind} gap {gap:.3g}, "
            f"limit {limit:g} in {str(dtype).removeprefix('torch.')}); {advice}"
        )
        if reaction == "stop":
            raise MismatchError(f'{message} (set actor.mismatch_check = "warn" to continue anyway)', cause)
        log.warning("%s", message)
    return {"canary/logprob_gap_mean": mean, "canary/logprob_gap_max": largest} if count else {}


def importance_metrics(gaps: Tensor, fresh: Tensor) -> dict[str, float]:
    """Of the weights π/μ of tokens that older weights sampled: the effective sample size (Σw)² / (n·Σw²), 1 if all are
    fresh, and the mean absolute log-ratio. Also the share of the tokens that are `fresh`: only those are compared."""
    weights = torch.exp(gaps.double().clamp(max=20.0))
    sums = [float(tensor.sum()) for tensor in (weights, weights.square(), gaps.abs(), fresh)]
    square, squares, gap, compared, count = distributed.sum_over_ranks([*sums, float(len(gaps))], gaps.device)
    return {
        "staleness/ess": square * square / max(count * squares, 1e-300),
        "staleness/logprob_gap": gap / max(count, 1.0),
        "canary/compared": compared / max(count, 1.0),
    }


def diagnose(evidence: Evidence) -> tuple[Cause, str]:
    """Return the likely cause of the gap and what to do about it."""
    gaps, versions = evidence.gaps, evidence.versions
    size = gaps.abs()
    mean = float(size.mean())
    stale = sorted(set(versions[(versions >= 0) & (versions != evidence.version)].tolist()))
    if stale:
        return "stale weights", (
            f"tokens were sampled by policy version {', '.join(map(str, stale))}, the learner is at "
            f"{evidence.version}: load the learner's weights into the policy after each update"
        )
    if not torch.isfinite(size).all():
        return "other weights", "some log-probs are not finite: look for NaN or inf in the rollouts and in the model"
    best_temperature, remaining_gap = _best_temperature(evidence)
    if remaining_gap < 0.1 * mean and best_temperature != evidence.temperature:
        return "temperature", (
            f"they agree at temperature {best_temperature:.3g} but the learner uses {evidence.temperature:g}: sample "
            "at rollout.temperature and report log-probs after temperature"
        )
    limit = max(MAX_GAP_FP32, 0.01 * mean)
    if float((gaps > limit).float().mean()) < 0.01 < float((gaps < -limit).float().mean()):
        return "top-p or top-k", (
            "the policy's log-probs are higher than the learner's, almost never lower: turn off top-p, top-k and "
            "penalties"
        )
    if mean < MEAN_GAP_HALF:
        return "precision", "the gap is small and affects all tokens: run policy and learner in the same precision"
    worst = {int(row) for row in evidence.rows[size > limit]}
    rows = {int(row) for row in evidence.rows}
    if len(worst) < len(rows):
        return "template", (
            f"{len(worst)} of {len(rows)} rows disagree, the others agree: their prompt_ids are not what the policy "
            "saw (another chat template, or re-tokenised text)"
        )
    return "other weights", "all rows disagree: the policy holds a different model, or weights of another step"


def _best_temperature(evidence: Evidence) -> tuple[float, float]:
    """The temperature with the smallest gap, and that gap: a grid search, then ever smaller steps around the best."""
    gaps = {temperature: evidence.probe(temperature) for temperature in {*TEMPERATURES, evidence.temperature}}
    best = min(gaps, key=gaps.__getitem__)
    width = 0.2 * best
    for _ in range(12):
        width /= 2
        for temperature in (best - width, best + width):
            gaps[temperature] = evidence.probe(temperature)
        best = min((best - width, best, best + width), key=lambda temperature: gaps.get(temperature, float("inf")))
    return best, gaps[best]
