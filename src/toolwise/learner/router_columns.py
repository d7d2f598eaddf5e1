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
    """One entry per rollout, or per sampled token of the batch. Where turns are routed one by one, a turn is a step."""

    router_log_prob: Tensor
    """[rollouts]; of turns the sum"""
    router_logits: Tensor
    """[rollouts, routes], of turns [steps, routes]; −∞ for a route that does not apply."""
    used_any_tool: Tensor
    used_search: Tensor
    used_calculate: Tensor
    """[rollouts]"""
    router_token_level_rewards: Tensor
    """[tokens] the router's reward at a rollout's last token, 0 elsewhere; of a turn at the turn's"""
    router_advantages: Tensor
    router_returns: Tensor
    """[tokens] the same for all tokens of a rollout, and equal, as in GRPO; of turns the same for all tokens of a turn,
    and the return is the sum of the rewards from it on"""
    turn_log_probs: Tensor | None = None
    """[steps] of each turn's route; None where there is one route per prompt."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A route that the router chose, and what it learns from it: of a rollout, or of one of its turns."""

    log_prob: float
    logits: tuple[float | None, ...]
    reward: float
    advantage: float
    value: float
    """The return."""


def router_columns(
    credited: Sequence[CreditedRollout], rollout_of_token: Any, step_of_token: Any, device: Any
) -> RouterColumns | None:
    """The columns of rollouts of which the router learns; None unless all are, and all are routed alike."""
    by_turn = all(c.rollout.turn_routes for c in credited)
    chosen = [(_turn_choices if by_turn else _choices)(c) for c in credited]
    credits = [c.annotated.scored.router for c in credited]
    known = [credit for credit in credits if credit is not None]
    if not credited or len(known) < len(credits) or any(choices is None for choices in chosen):
        return None

    def column(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.as_tensor(np.asarray(values)).to(device=device, dtype=dtype)

    all_choices = [choice for choices in chosen for choice in choices or ()]
    owner = np.asarray(step_of_token if by_turn else rollout_of_token, dtype=np.int64)
    last = np.append(owner[1:] != owner[:-1], True) if len(owner) else np.zeros(0, bool)
    rewards, advantages, returns = (
        np.array([getattr(choice, name) for choice in all_choices], np.float64)[owner]
        for name in ("reward", "advantage", "value")
    )
    return RouterColumns(
        router_log_prob=column([sum(choice.log_prob for choice in choices or ()) for choices in chosen]),
        router_logits=column([[-np.inf if x is None else x for x in choice.logits] for choice in all_choices]),
        used_any_tool=column([credit.used_any_tool for credit in known], torch.bool),
        used_search=column([credit.used_search for credit in known], torch.bool),
        used_calculate=column([credit.used_calculate for credit in known], torch.bool),
        router_token_level_rewards=column(np.where(last, rewards, 0.0)),
        router_advantages=column(advantages),
        router_returns=column(returns),
        turn_log_probs=column([choice.log_prob for choice in all_choices]) if by_turn else None,
    )


def _choices(credited: CreditedRollout) -> list[_Choice] | None:
    rollout, credit = credited.rollout, credited.annotated.scored.router
    if credit is None or credit.reward is None or rollout.router_logits is None:
        return None
    advantage = credit.advantage or 0.0
    return [_Choice(rollout.router_log_prob or 0.0, rollout.router_logits, credit.reward, advantage, advantage)]


def _turn_choices(credited: CreditedRollout) -> list[_Choice] | None:
    """One per step."""
    credit, turns = credited.annotated.scored.router, credited.rollout.turn_routes[: len(credited.steps)]
    if credit is None or not len(turns) == len(credit.turn_returns) == len(credited.steps):
        return None
    later = (*credit.turn_returns[1:], 0.0)
    choices = [
        _Choice(turn.log_prob, turn.logits, value - after, advantage, value)
        for turn, advantage, value, after in zip(turns, credit.turn_advantages, credit.turn_returns, later, strict=True)
        if turn.log_prob is not None and turn.logits is not None
    ]
    return choices if len(choices) == len(turns) else None
