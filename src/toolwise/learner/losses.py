"""PPO losses (Schulman et al. 2017, arXiv 1707.06347), per token. With ρ = exp(log π − log π_old):

    policy     L = −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A)      and for A < 0 at most −c·A (dual clip, Ye et al.
                                                                    2019, arXiv 1912.09729)
    value      L = ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)
    weight     w = min(π_old / π_rollout, C), detached              if π_old is not the policy that sampled the tokens

There is one importance correction, never two: either the rollout's log-probs are log π_old and there is no w, or the
learner recomputes log π_old and w corrects for the rest. Nothing here sums over tokens; see `loss_aggregation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from toolwise.errors import ToolwiseError
from toolwise.learner.correction import Correction
from toolwise.protocols import PolicyLoss
from toolwise.untrusted.user_code import call_part, describe_at

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 is already meaningless as a ratio; unbounded it would overflow, and inf · 0 is NaN."""


class PolicyLossError(ToolwiseError):
    """A user's policy loss failed or returned something invalid."""


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and a mask of where a clip is active."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    unclipped = ratio * advantages
    gain, is_clipped = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        below_floor = (advantages < 0) & (gain < floor)
        gain, is_clipped = torch.where(below_floor, floor, gain), is_clipped | below_floor
    return -gain, is_clipped


@dataclass(frozen=True, slots=True)
class PpoClip(PolicyLoss):
    """The clipped loss of PPO: `actor.policy_loss = "ppo"`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    metric_names: ClassVar[tuple[str, ...]] = ("clip_frac",)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, clipped = clipped_policy_loss(
            logprobs,
            old_logprobs,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return losses, {"clip_frac": clipped.float()}


def checked_policy_loss(
    loss: PolicyLoss, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls a policy loss; whatever goes wrong in a user's is a one-line error."""
    if type(loss) is PpoClip:  # no checks: they would wait for the device
        return loss(logprobs, old_logprobs, advantages, sequences)
    where = _name(loss)
    try:
        result: Any = call_part(loss, logprobs, old_logprobs, advantages, sequences)
        return _check_result(where, result, set(loss.metric_names), logprobs, old_logprobs, advantages)
    except PolicyLossError:
        raise
    except Exception as fault:
        raise PolicyLossError(f"{where} failed: {describe_at(fault)}") from fault


def _name(loss: PolicyLoss) -> str:
    return f"actor.policy_loss: {type(loss).__name__}"


def _check_result(
    where: str, result: Any, names: set[str], logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise PolicyLossError(f"{where} returned a {type(result).__name__}; return a tuple (losses, metrics)")
    losses, metrics = result
    if set(metrics) != names:
        returned, declared = (", ".join(sorted(map(str, some))) or "none" for some in (metrics, names))
        raise PolicyLossError(f"{where} returned the metrics {returned}, but metric_names are {declared}")
    for name, values in {"losses": losses, **metrics}.items():
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if shape != tuple(logprobs.shape):
            raise PolicyLossError(
                f"{where} returned {name} of shape {shape} for {len(logprobs)} tokens; return one value per token"
            )
        if values.device != logprobs.device or values.is_complex():
            raise PolicyLossError(
                f"{where} returned {name} of {values.dtype} on {values.device}; return real numbers, on "
                f"{logprobs.device}"
            )
    if losses.dtype != logprobs.dtype:
        raise PolicyLossError(
            f"{where} returned losses of {losses.dtype}, but logprobs are {logprobs.dtype}; return "
            "losses.to(logprobs.dtype)"
        )
    if logprobs.requires_grad and not losses.requires_grad:
        raise PolicyLossError(f"{where} returned losses without a gradient; compute them from logprobs")
    inputs = torch.stack([logprobs.detach(), old_logprobs, advantages])
    bad = ~torch.isfinite(losses) & torch.isfinite(inputs).all(0)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        new, old, advantage = inputs[:, at].tolist()
        raise PolicyLossError(
            f"{where} returned {losses[at].item()} for {int(bad.sum())} of {len(losses)} tokens, the first with "
            f"log-prob {new:g}, old log-prob {old:g} and advantage {advantage:g}; bound the ratio"
        )
    return losses, {name: value.detach() for name, value in metrics.items()}


class GradientCheck:
    """Finds out at the first update whether a user's loss depends on the log-probs: if not, it trains nothing."""

    def __init__(self, loss: PolicyLoss) -> None:
        self._where = _name(loss)
        self._pending = type(loss) is not PpoClip and not isinstance(loss, Correction)

    def observe(self, losses: Tensor, logprobs: Tensor) -> None:
        if not self._pending:
            return
        try:
            [gradient] = torch.autograd.grad(losses.sum(), logprobs, retain_graph=True, allow_unused=True)
        except Exception as fault:
            raise PolicyLossError(f"{self._where}: its gradient failed: {describe_at(fault)}") from fault
        if gradient is None:
            raise PolicyLossError(f"{self._where}: its losses do not depend on logprobs; compute them from logprobs")
        self._pending = not bool(gradient.any())

    def require(self, advantages: Tensor) -> None:
        """Raise if no gradient has been seen by the end of an update that had something to learn."""
        if self._pending and bool(advantages.any()):
            raise PolicyLossError(
                f"{self._where}: the gradient of its losses by logprobs is 0 for every token, though there are "
                "advantages, so nothing would be learned; compute the losses from logprobs, without detaching them"
            )


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token losses, and a mask of where the clip is active."""
    unclipped = (values - returns).square()
    if clip is None:
        return 0.5 * unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (clipped_values - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """π_old / π_rollout for each token, capped at `cap` and detached."""
    return torch.exp((old_logprobs - rollout_logprobs).detach().clamp(max=MAX_LOG_RATIO)).clamp(max=cap)
