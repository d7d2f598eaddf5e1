"""The canary: do policy and learner agree on what the same weights give the same tokens? Looked at in every update,
before any weight moves. Where they do not, everything learned is wrong, and nothing else would say so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from toolwise.errors import ToolwiseError
from toolwise.learner import distributed
from toolwise.learner.fingerprint import matches

log = logging.getLogger("toolwise.learner")

Reaction = Literal["stop", "warn", "off"]
Cause = Literal["stale weights", "temperature", "top-p or top-k", "template", "precision", "other weights"]

MAX_GAP_FP32 = 1e-3
MEAN_GAP_HALF = 0.05
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)


class CanaryError(ToolwiseError):
    """Policy and learner disagree; `cause` is what it looks like."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Evidence:
    """One entry a token; `gaps` are the learner's log-probs less the policy's."""

    gaps: Tensor
    rows: Tensor
    versions: Tensor
    """Of the policy, −1 where it did not say."""
    version: int
    """The learner's."""
    temperature: float
    probe: Callable[[float], float]
    """The mean gap if the learner took its log-probs at another temperature."""


class Canary:
    def __init__(self, reaction: Reaction, *, policy_fingerprint: Callable[[], str | None] | None = None) -> None:
        self.reaction = reaction
        self.policy_fingerprint = policy_fingerprint

    def check_weights(self, model: Any) -> None:
        """A policy that can say which weights it holds must hold the learner's."""
        reported = self.policy_fingerprint() if self.policy_fingerprint and self.reaction != "off" else None
        if reported is not None and not matches(model, reported):
            self._react(
                f"stale weights: the policy reports weights {reported}, which are not the learner's; "
                "load the learner's weights into the policy after each update",
                "stale weights",
            )

    def check_logprobs(self, evidence: Evidence, dtype: torch.dtype) -> dict[str, float]:
        """The figures of this update; beyond the bound of the precision the run stops, or is told of it."""
        gaps = evidence.gaps.abs()
        device = gaps.device
        total, count = distributed.sum_over_ranks([float(gaps.sum()), float(len(gaps))], device)
        [most] = distributed.max_over_ranks([float(gaps.max()) if len(gaps) else 0.0], device)
        mean = total / max(count, 1.0)
        figures = {"canary/logprob_gap_mean": mean, "canary/logprob_gap_max": most}
        half = torch.finfo(dtype).bits < 32
        gap, bound, kind = (mean, MEAN_GAP_HALF, "mean") if half else (most, MAX_GAP_FP32, "largest")
        if self.reaction != "off" and not gap <= bound:
            cause, told = diagnose(evidence) if len(gaps) else ("other weights", "see the other processes")
            self._react(
                f"{cause}: policy and learner disagree on the log-probs of the same tokens ({kind} gap {gap:.3g}, "
                f"bound {bound:g} in {str(dtype).removeprefix('torch.')}); {told}",
                cause,
            )
        return figures

    def _react(self, message: str, cause: Cause) -> None:
        if self.reaction == "stop":
            raise CanaryError(f'{message} (actor.canary = "warn" goes on regardless)', cause)
        log.warning("%s", message)


def diagnose(evidence: Evidence) -> tuple[Cause, str]:
    """What the gap looks like, and what to do about it."""
    gaps, versions = evidence.gaps, evidence.versions
    size = gaps.abs()
    mean = float(size.mean())
    other = sorted(set(versions[(versions >= 0) & (versions != evidence.version)].tolist()))
    if other:
        return "stale weights", (
            f"tokens were drawn by policy version {', '.join(map(str, other))}, the learner is at {evidence.version}: "
            "load the learner's weights into the policy after each update"
        )
    if not torch.isfinite(size).all():
        return "other weights", "some log-probs are not numbers: look for them in the rollouts and in the model"
    at, left = _best_temperature(evidence)
    if left < 0.1 * mean and at != evidence.temperature:
        return "temperature", (
            f"they agree at temperature {at:.3g} and the learner takes {evidence.temperature:g}: sample at "
            "rollout.temperature, and give log-probs after it"
        )
    bound = max(MAX_GAP_FP32, 0.01 * mean)
    if float((gaps > bound).float().mean()) < 0.01 < float((gaps < -bound).float().mean()):
        return "top-p or top-k", (
            "the policy finds its tokens likelier, almost never less likely: turn top-p, top-k and penalties off"
        )
    if mean < MEAN_GAP_HALF:
        return "precision", "the gap is small and everywhere: run policy and learner in the same precision"
    worst = {int(row) for row in evidence.rows[size > bound]}
    rows = {int(row) for row in evidence.rows}
    if len(worst) < len(rows):
        return "template", (
            f"{len(worst)} of {len(rows)} rows disagree and the others do not: their prompt_ids are not what the "
            "policy saw (another template, or text tokenised again)"
        )
    return "other weights", "all rows disagree: the policy holds another model, or weights of another step"


def _best_temperature(evidence: Evidence) -> tuple[float, float]:
    """Where the gap is least, and how much is left there: a grid, then narrowed."""
    tried = {at: evidence.probe(at) for at in {*TEMPERATURES, evidence.temperature}}
    best = min(tried, key=tried.__getitem__)
    width = 0.2 * best
    for _ in range(12):
        width /= 2
        for at in (best - width, best + width):
            tried[at] = evidence.probe(at)
        best = min((best - width, best, best + width), key=lambda at: tried.get(at, float("inf")))
    return best, tried[best]
