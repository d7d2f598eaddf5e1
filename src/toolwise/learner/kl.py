"""Per-token KL between the policy π and a reference (Schulman 2020, "Approximating KL divergence").

With r = log π − log π_ref at a token sampled from π, three estimators of KL(π ‖ π_ref); k1 and k3 are unbiased:

    k1 = r              k2 = ½·r²              k3 = exp(−r) − 1 + r ≥ 0

Their gradients are another matter, since the tokens are sampled from π too (each line is a test):

    in the reward   −β·k1      E[k1·∇log π] = ∇KL: correct
    as a loss        β·k2      E[∇k2] = E[r·∇log π] = ∇KL: correct
    as a loss        β·k3      E[∇k3] = ∇KL(π_ref ‖ π), the reverse KL: biased, and weak where π_ref is small
    as a loss        β·k1      E[∇k1] = E[∇log π] = 0: pure noise, no constraint; rejected

This assumes tokens sampled from π itself: exact in an update's first optimiser step, approximate afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolwise.config.algorithm import KlEstimator
from toolwise.errors import ConfigError
from toolwise.learner.losses import MAX_LOG_RATIO


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    log_ratio = logprobs - ref_logprobs
    return torch.expm1((-log_ratio).clamp(max=MAX_LOG_RATIO)) + log_ratio


def kl_loss(name: KlEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    check_kl_loss(name)
    return (k2 if name == "k2" else k3)(logprobs, ref_logprobs)


def check_kl_loss(name: KlEstimator) -> None:
    if name == "k1":
        raise ConfigError(
            'algorithm.kl_estimator = "k1" as a loss has a mean gradient of zero and would not constrain the policy: '
            'use "k2", or put k1 in the reward with algorithm.kl = "reward"'
        )


@dataclass(slots=True)
class KlCoefficient:
    """β, fixed or, with a target, adaptive (Ziegler et al. 2019, arXiv 1909.08593).

    β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) after a step of n rollouts with mean KL to the reference.
    """

    value: float
    target: float | None = None
    """Nats per token."""
    horizon: int = 1000
    """In rollouts: five times this many change β by at most a factor of e."""

    def adapt(self, kl: float, rollouts: int) -> None:
        if self.target is not None:
            error = min(0.2, max(-0.2, kl / self.target - 1.0))
            self.value *= min(2.0, max(0.5, 1.0 + error * rollouts / self.horizon))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
