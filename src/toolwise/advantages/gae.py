"""GAE: how much better the outcome was than a critic predicted, with a bias-variance trade-off λ.

    δ_t = r_t + γ · V_{t+1} − V_t          A_t = δ_t + γλ · A_{t+1}          return_t = A_t + V_t

Paper: Schulman et al. 2016, arXiv 1506.02438.

Per token (`per = "token"`): t runs over the sampled tokens of a rollout as if they were contiguous. Tool tokens are not
time steps: they are not discounted over and have no value or reward, so inserting them changes no reward, return or
advantage. V_t is the critic's value before token t.

Per turn (`per = "turn"`): t runs over the steps; V_t is the step's first value, so one value per step is enough. All
sampled tokens of a step get its advantage and its return.

Rewards: a step's reward (`step_rewards.py`) is placed on its last sampled token; if it has none, on the last token
before it. With a KL cost each token also earns −β · (log π_old − log π_ref).

End: after the last token V is 0. For a truncated rollout this treats the cut as a real end, which is right if the score
has judged it; `bootstrap_truncated` uses the last known value instead.

Whitening: `whiten` scales advantages (never returns) to mean 0 and variance 1 over all sampled tokens of the batch, or
over all turns.

Shapes: [batch, length] in `compute_gae_advantage_return`; over rollouts, one array per step with one entry per sampled
token. Grouping: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from toolwise.advantages.arrays import (
    Array,
    CreditError,
    Doubles,
    Ints,
    TokenMask,
    as_numpy,
    check_choice,
    check_fraction,
    discounted_sums,
    whiten,
    whitening_factor,
)
from toolwise.advantages.assign import credit_tokens
from toolwise.advantages.parts import attach_parts
from toolwise.advantages.step_rewards import BuiltinEstimator, TokenRewards, token_reward_parts, token_rewards_of
from toolwise.config.algorithm import GaeOptions
from toolwise.protocols import Annotation
from toolwise.types import AnnotatedRollout, CreditedBatch


def gae(
    rewards: Doubles, values: Doubles, lengths: Ints, gamma: float, lam: float, bootstrap: Doubles | None = None
) -> tuple[Doubles, Doubles]:
    """Advantages and returns over concatenated segments; `bootstrap` holds the value after the end of each."""
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    if len(rewards) == 0:
        return np.zeros(0), np.zeros(0)
    next_values = np.append(values[1:], 0.0)
    nonempty = lengths > 0
    next_values[np.cumsum(lengths)[nonempty] - 1] = 0.0 if bootstrap is None else bootstrap[nonempty]
    advantages = discounted_sums(rewards + gamma * next_values - values, lengths, gamma * lam)
    return advantages, advantages + values


def compute_gae_advantage_return(
    token_level_rewards: Array,
    values: Any,
    response_mask: Any,
    gamma: float,
    lam: float,
    *,
    whitened: bool = True,
    bootstrap: Any = None,
) -> tuple[Array, Array]:
    """GAE over arrays or tensors [batch, length]: (advantages, returns), both zero off the mask.

    `bootstrap` [batch] holds the value after the last token of each row whose episode was truncated.
    """
    mask = TokenMask.of(response_mask, rewards=token_level_rewards, values=values)
    end_values = None if bootstrap is None else as_numpy(bootstrap).astype(np.float64)
    raw, returns = gae(mask.gather(token_level_rewards), mask.gather(values), mask.lengths, gamma, lam, end_values)
    advantages = mask.scatter(whiten(raw) if whitened else raw, token_level_rewards)
    return advantages, mask.scatter(returns, token_level_rewards)


@dataclass(frozen=True)
class Gae(GaeOptions, BuiltinEstimator):
    """GAE: `adv_estimator = "gae"`."""

    gamma: float = 1.0
    per: Literal["token", "turn"] = "token"

    needs: ClassVar[frozenset[Annotation]] = frozenset({"values"})
    uses_step_rewards: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fraction("gamma", self.gamma)
        check_fraction("lam", self.lam)
        check_choice("per", self.per, ("token", "turn"))
        super().__post_init__()

    def learns_from_equal_scores(self, score: float) -> bool:
        return True

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        tokens = token_rewards_of(rollouts, self.rewards)
        lengths, sizes = tokens.tokens_per_rollout, np.ones(len(tokens.rewards), np.intp)
        has_tokens = tokens.counts > 0
        if self.per == "turn":
            lengths = np.bincount(tokens.rollout_of_step[has_tokens], minlength=len(rollouts)).astype(np.intp)
            sizes = tokens.counts[has_tokens]
        rewards = self._at_times(tokens.rewards, tokens)
        values = _critic_values(rollouts, tokens, per_token=self.per == "token")
        is_truncated = np.array([self.bootstrap_truncated and r.scored.rollout.stop_reason.truncated for r in rollouts])
        bootstrap = _last_values(values, lengths) * is_truncated
        raw, returns = gae(rewards, values, lengths, self.gamma, self.lam, bootstrap)
        advantages = whiten(raw) if self.whiten else raw
        credited = credit_tokens(rollouts, tokens.counts, np.repeat(advantages, sizes), np.repeat(returns, sizes))
        parts = {
            name: discounted_sums(self._at_times(part, tokens), lengths, self.gamma * self.lam)
            for name, part in token_reward_parts(rollouts, self.rewards, tokens).items()
        }
        parts["critic"] = gae(np.zeros(len(rewards)), values, lengths, self.gamma, self.lam, bootstrap)[0]
        factors = {}
        if self.whiten and len(raw):
            parts = {name: part - part.mean() for name, part in parts.items()}
            factors["whitening"] = np.full(len(tokens.rewards), whitening_factor(raw))
        by_token = {name: np.repeat(part, sizes) for name, part in parts.items()}
        return CreditedBatch(attach_parts(credited, by_token, factors, per="token"))

    def _at_times(self, rewards: Doubles, tokens: TokenRewards) -> Doubles:
        """Rewards of tokens; per turn, the sum over the tokens of each turn."""
        if self.per == "token":
            return rewards
        step_of_token = np.repeat(np.arange(len(tokens.counts)), tokens.counts)
        sums = np.bincount(step_of_token, rewards, len(tokens.counts)).astype(np.float64)
        return np.asarray(sums[tokens.counts > 0])


def _last_values(values: Doubles, lengths: Ints) -> Doubles:
    """The last value of each segment; 0 for an empty one."""
    last = np.zeros(len(lengths))
    nonempty = lengths > 0
    last[nonempty] = values[np.cumsum(lengths)[nonempty] - 1]
    return last


def _critic_values(rollouts: Sequence[AnnotatedRollout], tokens: TokenRewards, *, per_token: bool) -> Doubles:
    """One value per sampled token or, if not `per_token`, per step that has sampled tokens."""
    parts: list[Any] = []
    counts = iter(tokens.counts.tolist())
    for rollout in rollouts:
        name, steps = rollout.scored.rollout.rollout_id, rollout.scored.steps
        if rollout.values is None or len(rollout.values) != len(steps):
            raise CreditError(f"rollout {name} has no values for its {len(steps)} steps; gae needs a critic")
        for step, values in zip(steps, rollout.values, strict=True):
            count = next(counts)
            if len(values) < min(count, 1) or (per_token and len(values) != count):
                raise CreditError(
                    f"rollout {name}, step {step.system_step_index}: {len(values)} values for {count} sampled tokens"
                )
            parts.append(values if per_token else values[: min(count, 1)])
    return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)
