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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, signs
from toolwise.advantages.assign import with_advantage
from toolwise.advantages.grpo import Grpo
from toolwise.advantages.level_values import (
    MIN_SPREAD_NATS,
    Bools,
    alternative_rows,
    copo_weights,
    diversity_bonus,
    gate_factors,
    level_advantages,
    level_scores,
)
from toolwise.advantages.parts import flat_advantages, scaled_parts
from toolwise.config.algorithm import Gate, LevelCombination, LevelNormalization, LevelScoreKind, RlvcrOptions
from toolwise.protocols import AdvantageEstimator, Annotation, Metrics
from toolwise.types import (
    LEVEL_COUNT,
    AddedRollout,
    AdvantageParts,
    AnnotatedRollout,
    CreditedBatch,
    CreditedRollout,
    RewardSettings,
    ThinkingStep,
)

_CHOICES = {"mode": LevelNormalization, "score": LevelScoreKind, "gate": Gate, "combine": LevelCombination}


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


@dataclass(frozen=True)
class Rlvcr(RlvcrOptions, AdvantageEstimator):
    """RLVCR: `adv_estimator = "rlvcr"`."""

    trajectory: AdvantageEstimator = field(default_factory=Grpo)
    seed: int = 0
    compare_equal_scores: bool = True
    """Whether levels are also compared in groups of equal scores."""
    importance_cap: float = 2.0
    """reweight: bound on an action token's importance weight in a context in which it was not sampled."""
    reweight_floor: float = MIN_SPREAD_NATS

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
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
        adds = self.combine == "additive" and self.step_advantage_w != 0.0
        return (self.compare_equal_scores and adds and gate_open) or self.trajectory.learns_from_equal_scores(score)

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        base = self.trajectory(rollouts)
        comparison = self.compare(rollouts)
        metrics = {**base.metrics, **level_metrics(comparison)}
        if not comparison.step_indices:
            return replace(base, metrics=metrics)
        if self.combine == "reweight":
            credited, added = self._reweight(base.rollouts, comparison)
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
            bonus[row] = self.thinking_diversity_w * thinking.anneal * shares[rollouts[i].scored.rollout.group_id]
            for score in group.scores:
                cell = (row, score.level - 1)
                logprobs[cell], entropies[cell] = score.action_logprob, score.action_entropy
                tokens[cell] = score.thinking_tokens
        utilities = level_scores(logprobs, entropies, self.score) - price[:, None] * tokens + bonus
        return LevelComparison(
            [(i, t) for i, t, _ in grouped],
            [step for _, _, step in grouped],
            utilities,
            used,
            level_advantages(utilities, self.mode),
        )

    def _add_thinking_advantages(
        self, base: Sequence[CreditedRollout], comparison: LevelComparison
    ) -> list[CreditedRollout]:
        tokens = [list(rollout.advantages) for rollout in base]
        advantages, succeeded = self._outcomes(base, comparison)
        factors, level_only = gate_factors(self.gate, advantages, succeeded, self._solved(base, comparison))
        extra = self._maybe_shuffle(comparison.used_advantages, base) * factors
        for row, ((i, t), step) in enumerate(zip(comparison.step_indices, comparison.steps, strict=True)):
            current, count = tokens[i][t], step.head_tokens
            if level_only[row] and step.level_tokens is not None:
                count = step.level_tokens
            affected = np.arange(len(current)) < (len(current) if self.gate == "none" else count)
            tokens[i][t] = (current + np.float32(self.step_advantage_w * extra[row]) * affected).astype(np.float32)
        return _with_thinking_parts(_with_token_advantages(base, tokens), base, comparison)

    def _reweight(
        self, base: Sequence[CreditedRollout], comparison: LevelComparison
    ) -> tuple[list[CreditedRollout], list[AddedRollout]]:
        weights = self._maybe_shuffle(copo_weights(comparison.utilities, self.score, floor=self.reweight_floor), base)
        tokens = [list(rollout.advantages) for rollout in base]
        factors = [np.ones(sum(map(len, rollout.advantages))) for rollout in base]
        alternatives: list[AddedRollout] = []
        advantages, succeeded = self._outcomes(base, comparison)
        for row in np.flatnonzero((signs(advantages) > 0.0) & succeeded & np.isfinite(weights).all(1)).tolist():
            i, t = comparison.step_indices[row]
            tokens[i][t] = tokens[i][t] * np.float32(weights[row, comparison.used[row]])
            by_level = float(advantages[row]) * weights[row]
            alternatives += alternative_rows(base[i], t, comparison.steps[row], by_level, cap=self.importance_cap)
            factors[i][_token_slice(base[i], t)] = weights[row, comparison.used[row]]
        credited = _with_thinking_parts(_with_token_advantages(base, tokens), base, comparison, factors)
        return credited, alternatives

    def _outcomes(self, base: Sequence[CreditedRollout], comparison: LevelComparison) -> tuple[Doubles, Bools]:
        """The trajectory's advantage at each compared step, and whether its rollout succeeded."""
        advantages = np.array([base[i].steps[t].advantage or 0.0 for i, t in comparison.step_indices])
        if self.success_score is None:
            return advantages, signs(advantages) > 0.0
        scores = np.array([base[i].annotated.scored.score for i, _ in comparison.step_indices])
        return advantages, scores >= self.success_score

    def _solved(self, base: Sequence[CreditedRollout], comparison: LevelComparison) -> Bools:
        """Whether every rollout of the step's group reached `success_score`."""
        bound = math.inf if self.success_score is None else self.success_score
        below = {r.rollout.group_id for r in base if r.annotated.scored.score < bound}
        return np.array([base[i].rollout.group_id not in below for i, _ in comparison.step_indices])

    def _maybe_shuffle(self, values: Doubles, base: Sequence[CreditedRollout]) -> Doubles:
        """Seeds a different order for each batch, reproducible within a run."""
        order = list(range(len(values)))
        if self.shuffle:
            Random(f"{self.seed}/{base[0].rollout.rollout_id}").shuffle(order)
        return np.asarray(values[order])


@dataclass(frozen=True)
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


def _with_token_advantages(
    rollouts: Sequence[CreditedRollout], tokens: Sequence[Sequence[Any]]
) -> list[CreditedRollout]:
    """The rollouts with new token advantages; a step's advantage is the mean over its tokens."""
    credited = []
    for rollout, arrays in zip(rollouts, tokens, strict=True):
        steps = tuple(
            with_advantage(step, float(a.mean()) if len(a) else step.advantage or 0.0, step.return_to_go)
            for step, a in zip(rollout.steps, arrays, strict=True)
        )
        credited.append(CreditedRollout(rollout.annotated, steps, tuple(arrays), rollout.returns))
    return credited


def _with_thinking_parts(
    credited: Sequence[CreditedRollout],
    base: Sequence[CreditedRollout],
    comparison: LevelComparison,
    weights: Sequence[Doubles] | None = None,
) -> list[CreditedRollout]:
    """The rollouts with the parts of their `base`, what thinking adds to them or the `weights` it multiplies them by,
    and the advantage of each level that was compared."""
    levels: dict[int, dict[int, tuple[float, ...]]] = {}
    for (i, t), advantages in zip(comparison.step_indices, comparison.advantages.tolist(), strict=True):
        levels.setdefault(i, {})[t] = tuple(advantages)
    result = []
    for index, (after, before) in enumerate(zip(credited, base, strict=True)):
        known = before.parts or AdvantageParts(scaled_parts(before))
        if weights is not None:
            known = replace(known, factors={**known.factors, "reweighting": weights[index]})
        else:
            thinking = flat_advantages(after) - flat_advantages(before)
            known = replace(known, parts={**scaled_parts(before), "thinking": thinking}, factors={})
        result.append(replace(after, parts=replace(known, levels=levels.get(index, {}))))
    return result


def _token_slice(rollout: CreditedRollout, step: int) -> slice:
    """Where the tokens of a step are among those of the rollout."""
    counts = [len(array) for array in rollout.advantages]
    return slice(sum(counts[:step]), sum(counts[: step + 1]))
