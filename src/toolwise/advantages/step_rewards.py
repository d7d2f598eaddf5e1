"""The rewards of rollouts, steps and tokens as flat arrays: step rewards, the final score, then penalties and costs.

`score` is the value of a whole rollout, including its step rewards; `terminal_score` defines how both are used:

    remainder   the last step gets score − Σ base_reward: a rollout's rewards add up to exactly its score, and step
                rewards only say when it was earned. The remainder is 0 if the steps already add up to the score
    add         the last step gets the whole score, for a score that does not contain the step rewards. A rollout's
                total is score + Σ base_reward, also for estimators over whole rollouts
    never       the rewards are the step rewards alone; whole rollouts are still compared by their scores

Σ includes only base rewards that are set. Later adjustments change the total by the same amount: a missing base reward
counts as `default_step_reward`; `invalid_action_penalty` is subtracted from steps whose
`step_info["is_action_valid"]` is false; then come the costs:

    thinking   a rollout of n steps pays λ · Σ t_i / n, each step for its own t_i thinking tokens (`RolloutThinking`)
    KL         each sampled token pays β · (log π_old − log π_ref), the k1 estimator (`AnnotatedRollout.kl_coef`), whose
               gradient is correct when it is part of the reward

A rollout carries its costs from the start; its score and step rewards stay as they are. An estimator that computes
rewards with `total_rewards`, `episodes_from_rollouts` or `token_rewards_of` charges them. Returns are computed later.

Token rewards: the step's reward is placed on its last sampled token, and KL is charged at every token. The reward of a
step without sampled tokens goes to the last token before it, the decision that led to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, check_finite, integer_codes
from toolwise.advantages.assign import sampled_tokens
from toolwise.protocols import AdvantageEstimator, Metrics
from toolwise.types import AnnotatedRollout, RewardSettings, ScoredRollout, StepData, TerminalScore

REMAINDER_TOLERANCE = 1e-12
"""A remainder this small relative to its rewards is rounding error and counts as 0."""


class BuiltinEstimator(RewardSettings, AdvantageEstimator):
    """Base of the built-in estimators: its reward settings are fields of the estimator."""

    @property
    def rewards(self) -> RewardSettings:
        return self


@dataclass(frozen=True, slots=True)
class Episodes:
    """Rollouts as arrays: one entry per rollout, and the concatenated rewards of their steps."""

    scores: Doubles
    """Total of each rollout: its score, adjusted by `terminal_score`, defaults and penalties."""
    groups: Ints
    """Group code of each rollout, from 0."""
    lengths: Ints
    """Steps per rollout; their sum is the length of `rewards`."""
    rewards: Doubles

    @property
    def rollout_of_step(self) -> Ints:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def minus_costs(self, costs: Doubles) -> Episodes:
        """Subtracts each step's cost from its reward and from its rollout's score."""
        scores = self.scores - np.bincount(self.rollout_of_step, costs, len(self.lengths))
        return Episodes(scores, self.groups, self.lengths, self.rewards - costs)


def add_terminal_scores(
    base: Doubles, scores: Doubles, lengths: Ints, mode: TerminalScore, default_step_reward: float = 0.0
) -> tuple[Doubles, Doubles]:
    """The rewards of all steps and the totals of all rollouts. In `base`, NaN marks a missing reward."""
    check_choice("terminal_score", mode, get_args(TerminalScore))
    count, rollout_of_step = len(lengths), np.repeat(np.arange(len(lengths)), lengths)
    missing = np.isnan(base)
    known = np.where(missing, 0.0, base)
    sums = np.bincount(rollout_of_step, known, count)
    rewards = np.where(missing, default_step_reward, base)
    nonempty = lengths > 0
    last = np.cumsum(lengths)[nonempty] - 1
    if mode == "remainder":
        remainder = scores - sums
        remainder[
            np.abs(remainder)
            <= REMAINDER_TOLERANCE * (np.abs(scores) + np.bincount(rollout_of_step, np.abs(known), count))
        ] = 0.0
        rewards[last] += remainder[nonempty]
    elif mode == "add":
        rewards[last] += scores[nonempty]
        scores = scores + sums
    return rewards, scores + default_step_reward * np.bincount(rollout_of_step, missing, count)


def episodes_of(
    batch_of_steps: Sequence[Sequence[StepData]],
    scores: Sequence[float | None],
    group_ids: Sequence[Any],
    *,
    terminal_score: TerminalScore = "remainder",
    default_step_reward: float = 0.0,
    invalid_action_penalty: float = 0.0,
) -> Episodes:
    """Builds the arrays from steps. A score of None is the sum of the rollout's step rewards."""
    if not len(batch_of_steps) == len(scores) == len(group_ids):
        raise CreditError(
            f"{len(batch_of_steps)} rollouts, {len(scores)} final scores and {len(group_ids)} group ids; "
            "give one score and one group id for each rollout"
        )
    steps = [step for rollout in batch_of_steps for step in rollout]
    filled = [_sum_base_rewards(rollout) if s is None else s for rollout, s in zip(batch_of_steps, scores, strict=True)]
    final = np.array(filled, dtype=np.float64)
    if not np.isfinite(final).all():
        first = int(np.flatnonzero(~np.isfinite(final))[0])
        raise CreditError(f"final score of rollout {first} is not a finite number; leave it out")
    base = np.array([step.base_reward for step in steps], dtype=np.float64)  # None becomes NaN
    for step in (steps[i] for i in np.flatnonzero(~np.isfinite(base)).tolist()):
        if (reward := step.base_reward) is not None:
            raise CreditError(f"base_reward of step {step.system_step_index} is {reward}; give a finite number")
    lengths = np.array([len(rollout) for rollout in batch_of_steps], dtype=np.intp)
    rewards, totals = add_terminal_scores(base, final, lengths, terminal_score, default_step_reward)
    episodes = Episodes(totals, integer_codes(group_ids), lengths, rewards)
    if invalid_action_penalty:
        invalid = np.array([not step.step_info.get("is_action_valid", True) for step in steps], dtype=np.float64)
        episodes = episodes.minus_costs(invalid_action_penalty * invalid)
    return episodes


def total_rewards(rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings) -> Doubles:
    """Total reward of each rollout minus its costs, for estimators over whole rollouts."""
    thinking = np.array([0.0 if r.thinking is None else sum(r.thinking.step_costs) for r in rollouts])
    kl = np.array([kl_cost(r) for r in rollouts])
    return np.asarray(totals_before_costs([r.scored for r in rollouts], rewards) - thinking - kl)


def reward_parts(rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings) -> dict[str, Doubles]:
    """What `total_rewards` adds up, by name; costs that nobody pays are left out."""
    return {name: part.scores for name, part in episode_parts(rollouts, rewards).items()}


def episode_parts(
    rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings, *, kl: bool = True
) -> dict[str, Episodes]:
    """What `episodes_from_rollouts` adds up, by name; costs that nobody pays are left out."""
    before = _episodes_before_costs([r.scored for r in rollouts], rewards)
    parts = {"trajectory": before}
    for name, costs in (("price", _thinking_costs(rollouts)), ("kl", _kl_costs(rollouts) if kl else None)):
        if costs is not None:
            nothing = Episodes(np.zeros(len(rollouts)), before.groups, before.lengths, np.zeros(len(costs)))
            parts[name] = nothing.minus_costs(costs)
    return parts


def episodes_from_rollouts(
    rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings, *, kl: bool = True
) -> Episodes:
    """Rewards of steps and totals of rollouts minus their costs (without KL if not `kl`)."""
    episodes = _episodes_before_costs([r.scored for r in rollouts], rewards)
    if (thinking := _thinking_costs(rollouts)) is not None:
        episodes = episodes.minus_costs(thinking)
    if kl and (kl_costs := _kl_costs(rollouts)) is not None:
        episodes = episodes.minus_costs(kl_costs)
    return episodes


def _thinking_costs(rollouts: Sequence[AnnotatedRollout]) -> Doubles | None:
    """What each step pays for thinking; None if none does."""
    if not any(r.thinking is not None and r.thinking.charged for r in rollouts):
        return None
    costs = [(r.thinking and r.thinking.step_costs) or (0.0,) * len(r.scored.steps) for r in rollouts]
    return np.array([cost for of_rollout in costs for cost in of_rollout])


def _kl_costs(rollouts: Sequence[AnnotatedRollout]) -> Doubles | None:
    """What each step pays for KL; None if none does."""
    if not any(r.kl_coef for r in rollouts):
        return None
    return np.array([(r.kl_coef or 0.0) * float(part.sum()) for r in rollouts for part in token_k1(r)])


def _episodes_before_costs(scored: Sequence[ScoredRollout], rewards: RewardSettings) -> Episodes:
    return episodes_of(
        [s.steps for s in scored],
        [s.score for s in scored],
        [s.rollout.group_id for s in scored],
        terminal_score=rewards.terminal_score,
        default_step_reward=rewards.default_step_reward,
        invalid_action_penalty=rewards.invalid_action_penalty,
    )


def totals_before_costs(scored: Sequence[ScoredRollout], rewards: RewardSettings | None) -> Doubles:
    """Total reward of each rollout; without settings, its score."""
    if rewards is not None and (
        rewards.terminal_score == "add" or rewards.default_step_reward or rewards.invalid_action_penalty
    ):
        return _episodes_before_costs(scored, rewards).scores
    return np.array([s.score for s in scored], dtype=np.float64)  # step rewards do not matter here


def _sum_base_rewards(steps: Sequence[StepData]) -> float:
    """NaN if no base reward is set."""
    rewards = [step.base_reward for step in steps if step.base_reward is not None]
    return float(sum(rewards)) if rewards else float("nan")


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards of the sampled tokens of all rollouts, concatenated."""

    rewards: Doubles
    counts: Ints
    """Sampled tokens per step, in rollout order."""
    rollout_of_step: Ints
    tokens_per_rollout: Ints

    def place(self, step_rewards: Doubles) -> Doubles:
        """Step rewards at the last token of each step, or at the last token before it."""
        token_ends = np.cumsum(self.counts)
        rollout_starts = np.cumsum(self.tokens_per_rollout) - self.tokens_per_rollout
        has_token = token_ends > rollout_starts[self.rollout_of_step]  # the rollout has one at or before this step
        return np.bincount(token_ends[has_token] - 1, step_rewards[has_token], len(self.rewards)).astype(np.float64)


def token_rewards_of(rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings) -> TokenRewards:
    """Rewards of tokens minus their costs; thinking is charged to the step's last token, like its reward."""
    episodes = episodes_from_rollouts(rollouts, rewards, kl=False)
    counts = np.array([sampled_tokens(step) for r in rollouts for step in r.scored.steps], dtype=np.intp)
    rollout_of_step = episodes.rollout_of_step
    tokens_per_rollout = np.bincount(rollout_of_step, counts, len(rollouts)).astype(np.intp)
    tokens = TokenRewards(_token_kl_rewards(rollouts, int(counts.sum())), counts, rollout_of_step, tokens_per_rollout)
    return replace(tokens, rewards=tokens.rewards + tokens.place(episodes.rewards))


def token_reward_parts(
    rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings, tokens: TokenRewards
) -> dict[str, Doubles]:
    """What `token_rewards_of` adds up, by name; costs that nobody pays are left out."""
    episodes = episode_parts(rollouts, rewards, kl=False)
    parts = {name: tokens.place(part.rewards) for name, part in episodes.items()}
    if any(r.kl_coef for r in rollouts):
        parts["kl"] = _token_kl_rewards(rollouts, len(tokens.rewards))
    return parts


def _token_kl_rewards(rollouts: Sequence[AnnotatedRollout], count: int) -> Doubles:
    if not any(r.kl_coef for r in rollouts):
        return np.zeros(count)
    kl_costs = ((r.kl_coef or 0.0) * part for r in rollouts for part in token_k1(r))
    return np.asarray(-np.concatenate([np.zeros(0), *kl_costs]))


def kl_cost(rollout: AnnotatedRollout) -> float:
    return rollout.kl_coef * float(sum(part.sum() for part in token_k1(rollout))) if rollout.kl_coef else 0.0


def call_costs(rollouts: Sequence[AnnotatedRollout]) -> Doubles:
    """What each rollout cost: in the unit of the router's first budget or, without a router, by the tools' prices."""
    costs = np.array([r.scored.cost for r in rollouts], dtype=np.float64)
    check_finite(costs, "cost")
    return costs


def cost_metrics(rollouts: Sequence[AnnotatedRollout]) -> Metrics:
    """The mean KL cost of a rollout, if it is part of the reward."""
    costs = [kl_cost(r) for r in rollouts if r.kl_coef is not None]
    return {"kl/cost": float(np.mean(costs))} if costs else {}


def token_k1(rollout: AnnotatedRollout) -> list[Doubles]:
    """log π_old − log π_ref of each sampled token, one array per step."""
    name, steps = rollout.scored.rollout.rollout_id, rollout.scored.steps
    if rollout.ref_logprobs is None:
        raise CreditError(f"rollout {name} has no reference log-probs: the learner must annotate them")
    # If the learner did not recompute them, the sampling log-probs are the old ones.
    sampled: list[Any] = [step.tokens.logprobs for step in steps]
    parts = []
    for step, old, reference in zip(steps, rollout.old_logprobs or sampled, rollout.ref_logprobs, strict=True):
        if not len(old) == len(reference) == sampled_tokens(step):
            raise CreditError(
                f"rollout {name}, step {step.system_step_index}: {len(old)} old and {len(reference)} reference "
                f"log-probs for {sampled_tokens(step)} sampled tokens"
            )
        parts.append(np.asarray(old, dtype=np.float64) - np.asarray(reference, dtype=np.float64))
    return parts
