"""RLVCR: learns how hard to think by adding the value of the thinking level used to the rollout's advantage.

For each step the same action is scored after the thoughts of all four levels (thinking/). With A_think of
`level_values.py`:

    A = A_traj + w · A_think                    gate = "none", the original form; on all tokens of the step
    A = A_traj + w · sign(A_traj) · A_think     gate = "signed"; on level and thought, the action keeps A_traj; if the
                                                whole group reaches `success_score`, same as "success"
    A = A_traj + w · 1[succeeded] · A_think     gate = "success"; on the level tokens only
    A = w_l · A_traj, all four rows train       combine = "reweight" (CoPO); steps of rollouts that beat their group

A_traj is GRPO's or GiGPO's. Gate "none" has two biases: an action is more likely after the thought it was sampled
after, and confidence in bad actions is rewarded; "signed" rewards confidence in good actions and doubt in bad ones. If
a whole group succeeds, the sign says nothing about actions. What is left to learn is to think less, which is credited
to the level and not to the thought: rewarding every thought with nothing to oppose it makes thoughts drift.

The utility u_l includes the cost of thinking tokens (λ, from `RolloutThinking`) and a diversity bonus, annealed to 0
over training: weight · (1 − share of l among the steps of its group). Steps without a group of levels have no A_think.
The level is sampled by the policy, so its tokens are in the loss like all sampled tokens.

`shuffle` is a control: it permutes the thinking advantages among the steps of the batch, so that any gain that remains
does not come from their content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from toolwise.advantages.alternative_rows import alternative_rows
from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, sign
from toolwise.advantages.assign import with_advantage
from toolwise.advantages.grpo import Grpo
from toolwise.advantages.level_values import (
    MIN_SPREAD_NATS,
    LevelNormalization,
    LevelScoreKind,
    copo_weights,
    diversity_bonus,
    level_advantages,
    level_scores,
)
from toolwise.protocols import AdvantageEstimator, Annotation, Metrics
from toolwise.types import (
    LEVEL_COUNT,
    AddedRollout,
    AnnotatedRollout,
    CreditedBatch,
    CreditedRollout,
    RewardSettings,
    ThinkingStep,
)

Gate = Literal["none", "signed", "success"]
Combine = Literal["additive", "reweight"]


@dataclass(frozen=True, slots=True)
class LevelComparison:
    """The steps that have a group of levels, as arrays [steps, levels]."""

    step_indices: list[tuple[int, int]]
    """(rollout, step) indices in batch order."""
    steps: list[ThinkingStep]
    utilities: Doubles
    used: Ints
    advantages: Doubles
    """A_think of every level."""

    @property
    def used_advantages(self) -> Doubles:
        return np.asarray(self.advantages[np.arange(len(self.used)), self.used])


@dataclass(frozen=True, slots=True)
class Rlvcr(AdvantageEstimator):
    """RLVCR: `adv_estimator = "rlvcr"`."""

    trajectory: AdvantageEstimator = field(default_factory=Grpo)
    step_advantage_w: float = 1.0
    thinking_diversity_w: float = 0.5
    mode: LevelNormalization = "mean_norm"
    score: LevelScoreKind = "logprob"
    gate: Gate = "none"
    combine: Combine = "additive"
    shuffle: bool = False
    seed: int = 0
    success_score: float | None = None
    """A rollout succeeds if its score is at least this; if None, if its advantage is above 0."""
    compare_equal_scores: bool = True
    """Whether levels are also compared in groups of equal scores."""
    importance_cap: float = 2.0
    """reweight: bound on an action token's importance weight in a context in which it was not sampled."""
    reweight_floor: float = MIN_SPREAD_NATS

    def __post_init__(self) -> None:
        for name, known in (
            ("mode", LevelNormalization),
            ("score", LevelScoreKind),
            ("gate", Gate),
            ("combine", Combine),
        ):
            check_choice(name, getattr(self, name), get_args(known))
        if self.combine == "reweight" and self.gate != "none":
            raise CreditError(
                f'gate = "{self.gate}" belongs to combine = "additive"; with "reweight" leave gate = "none"'
            )

    @property
    def needs(self) -> frozenset[Annotation]:
        return self.trajectory.needs

    @property
    def rewards(self) -> RewardSettings | None:
        return self.trajectory.rewards

    @property
    def uses_step_rewards(self) -> bool:
        return self.trajectory.uses_step_rewards

    @property
    def min_group_size(self) -> int:
        return self.trajectory.min_group_size

    @property
    def per(self) -> Literal["token", "turn"]:
        return self.trajectory.per

    def learns_from_equal_scores(self, score: float) -> bool:
        """Rollouts with equal scores may still differ in how well they thought, unless the gate excludes them."""
        gate_open = self.gate == "none" or (self.success_score is not None and score >= self.success_score)
        compares = (
            self.compare_equal_scores and self.combine == "additive" and gate_open and self.step_advantage_w != 0.0
        )
        return compares or self.trajectory.learns_from_equal_scores(score)

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        base = self.trajectory(rollouts)
        comparison = self.compare(rollouts)
        metrics = {**base.metrics, **level_metrics(comparison)}
        if not comparison.step_indices:
            return replace(base, metrics=metrics)
        if self.combine == "reweight":
            credited, added = self._reweight(rollouts, base.rollouts, comparison)
            metrics["thinking/rows_added"] = float(len(added))
            return CreditedBatch(credited, metrics, [*base.added, *added])
        return replace(base, rollouts=self._add_thinking_advantages(base.rollouts, comparison), metrics=metrics)

    def compare(self, rollouts: Sequence[AnnotatedRollout]) -> LevelComparison:
        """Compares the levels at every step that has a group."""
        grouped = [
            (i, t, step)
            for i, rollout in enumerate(rollouts)
            for t, step in enumerate(_thinking_steps(rollout))
            if step.group is not None
        ]
        logprobs, entropies, tokens, bonus = (np.full((len(grouped), LEVEL_COUNT), np.nan) for _ in range(4))
        used, price = np.zeros(len(grouped), dtype=np.intp), np.zeros(len(grouped))
        shares = diversity_bonus(
            [step.level for rollout in rollouts for step in _thinking_steps(rollout)],
            [rollout.scored.rollout.group_id for rollout in rollouts for _ in _thinking_steps(rollout)],
        )
        for row, (i, _, step) in enumerate(grouped):
            thinking, group = rollouts[i].thinking, step.group
            assert thinking is not None  # the step came from it
            assert group is not None
            used[row], price[row] = group.level - 1, thinking.price
            weight = self.thinking_diversity_w * thinking.anneal
            bonus[row] = weight * shares[rollouts[i].scored.rollout.group_id]
            for score in group.scores:
                cell = (row, score.level - 1)
                logprobs[cell], entropies[cell] = score.action_logprob, score.action_entropy
                tokens[cell] = score.thinking_tokens
        utilities = level_scores(logprobs, entropies, self.score) - price[:, None] * tokens + bonus
        step_indices = [(i, t) for i, t, _ in grouped]
        advantages = level_advantages(utilities, self.mode)
        return LevelComparison(step_indices, [step for _, _, step in grouped], utilities, used, advantages)

    def _add_thinking_advantages(
        self, base: Sequence[CreditedRollout], comparison: LevelComparison
    ) -> list[CreditedRollout]:
        used_advantages = self._maybe_shuffle(comparison.used_advantages, base)
        tokens = [list(rollout.advantages) for rollout in base]
        solved = self._solved_groups(base)
        for (i, t), step, extra in zip(
            comparison.step_indices, comparison.steps, used_advantages.tolist(), strict=True
        ):
            current, advantage = tokens[i][t], base[i].steps[t].advantage or 0.0
            level_only = self.gate == "success" or base[i].rollout.group_id in solved
            affected = np.arange(len(current)) < self._affected_token_count(step, len(current), level_only=level_only)
            extra *= self._gate_factor(base[i].annotated, advantage, level_only=level_only)
            tokens[i][t] = (current + np.float32(self.step_advantage_w * extra) * affected).astype(np.float32)
        return [_with_token_advantages(rollout, values) for rollout, values in zip(base, tokens, strict=True)]

    def _reweight(
        self, rollouts: Sequence[AnnotatedRollout], base: Sequence[CreditedRollout], comparison: LevelComparison
    ) -> tuple[list[CreditedRollout], list[AddedRollout]]:
        weights = self._maybe_shuffle(copo_weights(comparison.utilities, self.score, floor=self.reweight_floor), base)
        tokens = [list(rollout.advantages) for rollout in base]
        alternatives: list[AddedRollout] = []
        for row, ((i, t), step) in enumerate(zip(comparison.step_indices, comparison.steps, strict=True)):
            advantage = base[i].steps[t].advantage or 0.0
            reinforced = sign(advantage) > 0.0 and self._succeeded(rollouts[i], advantage)
            if not reinforced or not np.isfinite(weights[row]).all():
                continue
            tokens[i][t] = tokens[i][t] * np.float32(weights[row, comparison.used[row]])
            alternatives += alternative_rows(base[i], t, step, advantage * weights[row], cap=self.importance_cap)
        credited = [_with_token_advantages(rollout, values) for rollout, values in zip(base, tokens, strict=True)]
        return credited, alternatives

    def _solved_groups(self, base: Sequence[CreditedRollout]) -> set[str]:
        """Groups in which every rollout succeeded, so that nothing distinguishes good actions from bad ones."""
        if self.success_score is None:
            return set()
        below = {r.rollout.group_id for r in base if r.annotated.scored.score < self.success_score}
        return {r.rollout.group_id for r in base} - below

    def _affected_token_count(self, step: ThinkingStep, tokens: int, *, level_only: bool) -> int:
        """The number of leading tokens that get the thinking advantage; `level_only`: only those of the level."""
        if self.gate == "none":
            return tokens
        return step.level_tokens if level_only and step.level_tokens is not None else step.head_tokens

    def _gate_factor(self, rollout: AnnotatedRollout, advantage: float, *, level_only: bool) -> float:
        """The factor of a step's thinking advantage."""
        if self.gate == "none":
            return 1.0
        return float(self._succeeded(rollout, advantage)) if level_only else sign(advantage)

    def _succeeded(self, rollout: AnnotatedRollout, advantage: float) -> bool:
        return sign(advantage) > 0.0 if self.success_score is None else rollout.scored.score >= self.success_score

    def _maybe_shuffle(self, values: Doubles, base: Sequence[CreditedRollout]) -> Doubles:
        """Seeds a different order for each batch, reproducible within a run."""
        order = list(range(len(values)))
        if self.shuffle:
            Random(f"{self.seed}/{base[0].rollout.rollout_id}").shuffle(order)
        return np.asarray(values[order])


@dataclass(frozen=True, slots=True)
class MonitoredEstimator(Rlvcr):
    """The advantages of `trajectory` plus RLVCR's metrics: `rlvcr.enable` without `adv_estimator = "rlvcr"`."""

    def learns_from_equal_scores(self, score: float) -> bool:
        return self.trajectory.learns_from_equal_scores(score)

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        base = self.trajectory(rollouts)
        return replace(base, metrics={**base.metrics, **level_metrics(self.compare(rollouts))})


def level_metrics(comparison: LevelComparison) -> Metrics:
    """Mean A_think by used level, and by level whether used or not."""
    if not comparison.step_indices:
        return {}
    used_advantages = comparison.used_advantages
    metrics = {
        "thinking/advantage": float(used_advantages.mean()),
        "thinking/frac_positive": float((used_advantages > 0).mean()),
    }
    for level in range(LEVEL_COUNT):
        of_level, column = used_advantages[comparison.used == level], comparison.advantages[:, level]
        if len(of_level):
            metrics[f"thinking/advantage_used_{level + 1}"] = float(of_level.mean())
        if np.isfinite(column).any():
            metrics[f"thinking/advantage_level_{level + 1}"] = float(np.nanmean(column))
    return metrics


def _thinking_steps(rollout: AnnotatedRollout) -> Sequence[ThinkingStep]:
    return () if rollout.thinking is None else rollout.thinking.steps


def _with_token_advantages(rollout: CreditedRollout, tokens: Sequence[Any]) -> CreditedRollout:
    """The rollout with new token advantages; a step's advantage is the mean over its tokens."""
    steps = tuple(
        with_advantage(step, float(a.mean()) if len(a) else step.advantage or 0.0, step.return_to_go)
        for step, a in zip(rollout.steps, tokens, strict=True)
    )
    return CreditedRollout(rollout.annotated, steps, tuple(tokens), rollout.returns)
