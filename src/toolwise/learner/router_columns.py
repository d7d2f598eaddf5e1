"""What the router chose and learns from the rollouts of a batch, beside the actor's own columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.types import CreditedRollout


@dataclass(frozen=True, slots=True)
class RouterColumns:
    """One entry per rollout, or per sampled token of the batch."""

    router_log_prob: Tensor
    """[rollouts]"""
    router_logits: Tensor
    """[rollouts, routes]; −∞ for a route that does not apply."""
    used_any_tool: Tensor
    used_search: Tensor
    used_calculate: Tensor
    """[rollouts]"""
    router_token_level_rewards: Tensor
    """[tokens] the router's reward at a rollout's last token, 0 elsewhere"""
    router_advantages: Tensor
    router_returns: Tensor
    """[tokens] the same for all tokens of a rollout; equal, as in GRPO"""


def router_columns(credited: Sequence[CreditedRollout], rollout_of_token: Any, device: Any) -> RouterColumns | None:
    """The columns of rollouts of which the router learns; None unless all are."""
    rollouts = [c.rollout for c in credited]
    credits = [c.annotated.scored.router for c in credited]
    known = [credit for credit in credits if credit is not None and credit.reward is not None]
    logits = [rollout.router_logits for rollout in rollouts if rollout.router_logits is not None]
    if not credited or len(known) < len(credits) or len(logits) < len(rollouts):
        return None

    def column(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(np.asarray(values)).to(device=device, dtype=dtype)

    tokens = np.asarray(rollout_of_token, dtype=np.int64)
    advantages = column(np.array([credit.advantage or 0.0 for credit in known])[tokens])
    last = np.append(tokens[1:] != tokens[:-1], True) if len(tokens) else np.zeros(0, bool)
    return RouterColumns(
        router_log_prob=column([rollout.router_log_prob or 0.0 for rollout in rollouts]),
        router_logits=column([[-np.inf if x is None else x for x in row] for row in logits]),
        used_any_tool=column([credit.used_any_tool for credit in known], torch.bool),
        used_search=column([credit.used_search for credit in known], torch.bool),
        used_calculate=column([credit.used_calculate for credit in known], torch.bool),
        router_token_level_rewards=column(np.where(last, np.array([c.reward for c in known])[tokens], 0.0)),
        router_advantages=advantages,
        router_returns=advantages,
    )
