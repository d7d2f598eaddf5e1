"""RLVCR: how hard to think is learned by what the level used was worth for the action taken, beside the rollout's own
advantage. For each step the same action is scored after the thoughts of all four levels (thinking/); with A_think of
`levels.py`:

    A = A_traj + w · A_think                    gate = "none", the document's; on all tokens of the step
    A = A_traj + w · sign(A_traj) · A_think     gate = "signed"; on level and thought, the action keeps A_traj; where
                                                all of a group reach `success_score`, as "success"
    A = A_traj + w · 1[succeeded] · A_think     gate = "success"; on the level alone
    A = w_l · A_traj, all four rows train       combine = "reweight", CoPO's; steps of rollouts that beat their group

A_traj is GRPO's, or GiGPO's. gate "none" has two biases: an action is likelier after the thought it was drawn after,
and confidence in bad actions is praised; "signed" asks for confidence in good actions and for doubt in bad ones. Where
all of a group succeed the sign says nothing of actions. What is left to learn there is to think less, and it is asked
of the level, not of the thought: with nothing against it, praise for whatever was thought makes thoughts drift.
u_l has the price of thinking tokens (λ, from the `RolloutThinking`) and, annealed to 0 over training, diversity:
weight ·
(1 − share of l among the steps of its group). Steps without a group of levels have no A_think. The level is sampled by
the policy and in the loss, as all that it sampled is.

`shuffle` is a control: thinking advantages are dealt out anew among the steps of the batch, so that whatever a run
gains with it is not owed to what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from toolwise.advantages.alternative_rows import alternative_rows
from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, sign
from toolwise.advantages.assign import credit, learns_from_equal_scores, min_group_size, with_advantage
from toolwise.advantages.grpo import Grpo
from toolwise.advantages.level_values import (
    LEVEL_COUNT,
    MIN_SPREAD_NATS,
    LevelNormalization,
    LevelScoreKind,
    copo_weights,
    diversity_bonus,
    level_advantages,
    level_scores,
)
from toolwise.advantages.thinking_cost import credit_with_thinking_cost
from toolwise.protocols import AdvantageEstimator, Annotation, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, ThinkingStep

Gate = Literal["none", "signed", "success"]
Combine = Literal["additive", "reweight"]


@dataclass(frozen=True, slots=True)
class LevelComparison:
    """The steps that have a group, as arrays over their levels."""

    step_indices: list[tuple[int, int]]
    """(rollout, step) in the order of the batch."""
    steps: list[ThinkingStep]
    utilities: Doubles
    used: Ints
    advantages: Doubles
    """A_think of every level."""

    @property
    def used_advantages(self) -> Doubles:
        return np.asarray(self.advantages[np.arange(len(self.used)), self.used])


@dataclass(frozen=True, slots=True)
class Rlvcr:
    """`adv_estimator = "rlvcr"`"""

    trajectory: AdvantageEstimator = field(default_factory=Grpo)
    step_advantage_w: float = 1.0
    thinking_diversity_w: float = 0.5
    mode: LevelNormalization = "mean_norm"
    score: LevelScoreKind = "logprob"
    gate: Gate = "none"
    combine: Combine = "additive"
    shuffle: bool = False
    seed: int = 0
    price_rollouts: bool = False
    """A_traj is of each score less the price of its thinking tokens: `priced.py`, as a `MonitoredEstimator`
    estimator's may be."""
    success_score: float | None = None
    """What succeeding is: this score or more, as the reward gave it; without it, an advantage above 0."""
    compare_equal_scores: bool = True
    """Whether groups of equal scores are thought over as others are."""
    importance_cap: float = 2.0
    """reweight: the bound of an action token's weight in a context that it was not drawn in."""
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
    def min_group_size(self) -> int:
        return min_group_size(self.trajectory)

    def learns_from_equal_scores(self, score: float) -> bool:
        """Rollouts of equal scores may still have thought unequally well, unless the gate shuts them out."""
        open_ = self.gate == "none" or (self.success_score is not None and score >= self.success_score)
        teaches = self.compare_equal_scores and self.combine == "additive" and open_ and self.step_advantage_w != 0.0
        return teaches or self.price_rollouts or learns_from_equal_scores(self.trajectory, score)

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return self.credit(rollouts)[0]

    def credit(self, rollouts: Sequence[AnnotatedRollout]) -> tuple[list[CreditedRollout], Metrics]:
        base, metrics = (credit_with_thinking_cost if self.price_rollouts else credit)(self.trajectory, rollouts)
        compared = self.compare(rollouts)
        metrics |= level_metrics(compared)
        if not compared.step_indices:
            return base, metrics
        if self.combine == "reweight":
            credited, more = self._reweight(rollouts, base, compared)
        else:
            credited, more = self._add_thinking_advantages(base, compared)
        return credited, metrics | more

    def compare(self, rollouts: Sequence[AnnotatedRollout]) -> LevelComparison:
        """What every level was worth at every step that has a group."""
        found = [
            (number, index, step)
            for number, rollout in enumerate(rollouts)
            for index, step in enumerate(_thinking_steps(rollout))
            if step.group is not None
        ]
        logprobs, entropies, tokens, bonus = (np.full((len(found), LEVEL_COUNT), np.nan) for _ in range(4))
        used, price = np.zeros(len(found), dtype=np.intp), np.zeros(len(found))
        shares = diversity_bonus(
            [step.level for rollout in rollouts for step in _thinking_steps(rollout)],
            [rollout.scored.rollout.group_id for rollout in rollouts for _ in _thinking_steps(rollout)],
        )
        for row, (number, _, step) in enumerate(found):
            deliberation, group = rollouts[number].thinking, step.group
            assert deliberation is not None  # it is where the step came from
            assert group is not None
            used[row], price[row] = group.level - 1, deliberation.price
            weight = self.thinking_diversity_w * deliberation.anneal
            bonus[row] = weight * shares[rollouts[number].scored.rollout.group_id]
            for score in group.scores:
                place = (row, score.level - 1)
                logprobs[place], entropies[place] = score.action_logprob, score.action_entropy
                tokens[place] = score.thinking_tokens
        utilities = level_scores(logprobs, entropies, self.score) - price[:, None] * tokens + bonus
        step_indices = [(number, index) for number, index, _ in found]
        advantages = level_advantages(utilities, self.mode)
        return LevelComparison(step_indices, [step for _, _, step in found], utilities, used, advantages)

    def _add_thinking_advantages(
        self, base: Sequence[CreditedRollout], compared: LevelComparison
    ) -> tuple[list[CreditedRollout], Metrics]:
        used_advantages = self._maybe_shuffle(compared.used_advantages, base)
        tokens = [list(rollout.advantages) for rollout in base]
        settled = self._solved_groups(base)
        for (number, index), step, extra in zip(
            compared.step_indices, compared.steps, used_advantages.tolist(), strict=True
        ):
            before, advantage = tokens[number][index], base[number].steps[index].advantage or 0.0
            level_only = self.gate == "success" or base[number].rollout.group_id in settled
            where = np.arange(len(before)) < self._affected_token_count(step, len(before), level_only=level_only)
            extra *= self._gate_factor(base[number].annotated, advantage, level_only=level_only)
            tokens[number][index] = (before + np.float32(self.step_advantage_w * extra) * where).astype(np.float32)
        return [_with_token_advantages(rollout, found) for rollout, found in zip(base, tokens, strict=True)], {}

    def _reweight(
        self, rollouts: Sequence[AnnotatedRollout], base: Sequence[CreditedRollout], compared: LevelComparison
    ) -> tuple[list[CreditedRollout], Metrics]:
        weights = copo_weights(compared.utilities, self.score, floor=self.reweight_floor)
        if self.shuffle:
            order = _permutation(len(weights), f"{self.seed}/{_batch_name(base)}")
            weights = weights[order]
        tokens = [list(rollout.advantages) for rollout in base]
        extra: list[CreditedRollout] = []
        for row, ((number, index), step) in enumerate(zip(compared.step_indices, compared.steps, strict=True)):
            advantage = base[number].steps[index].advantage or 0.0
            beats = sign(advantage) > 0.0 and self._succeeded(rollouts[number], advantage)
            if not beats or not np.isfinite(weights[row]).all():
                continue
            tokens[number][index] = tokens[number][index] * np.float32(weights[row, compared.used[row]])
            extra += alternative_rows(base[number], index, step, advantage * weights[row], cap=self.importance_cap)
        credited = [_with_token_advantages(rollout, found) for rollout, found in zip(base, tokens, strict=True)]
        return credited + extra, {"thinking/rows_added": float(len(extra))}

    def _solved_groups(self, base: Sequence[CreditedRollout]) -> set[str]:
        """Groups in which all reached the score that is success: nothing in them tells a good action from a bad one."""
        if self.success_score is None:
            return set()
        below = {r.rollout.group_id for r in base if r.annotated.scored.score < self.success_score}
        return {r.rollout.group_id for r in base} - below

    def _affected_token_count(self, step: ThinkingStep, tokens: int, *, level_only: bool) -> int:
        """How many of a step's first tokens its thinking advantage is for; `level_only`: those of the level."""
        if self.gate == "none":
            return tokens
        return step.level_tokens if level_only and step.level_tokens is not None else step.head_tokens

    def _gate_factor(self, rollout: AnnotatedRollout, advantage: float, *, level_only: bool) -> float:
        """What a step's thinking advantage counts for."""
        if self.gate == "none":
            return 1.0
        return float(self._succeeded(rollout, advantage)) if level_only else sign(advantage)

    def _succeeded(self, rollout: AnnotatedRollout, advantage: float) -> bool:
        return sign(advantage) > 0.0 if self.success_score is None else rollout.scored.score >= self.success_score

    def _maybe_shuffle(self, used_advantages: Doubles, base: Sequence[CreditedRollout]) -> Doubles:
        if not self.shuffle:
            return used_advantages
        return np.asarray(used_advantages[_permutation(len(used_advantages), f"{self.seed}/{_batch_name(base)}")])


@dataclass(frozen=True, slots=True)
class MonitoredEstimator:
    """Another estimator's credit, and the figures that RLVCR would have: `rlvcr.enable` without `adv_estimator`.

    `priced`: the same price as RLVCR's, but outside the four (`priced.py`): it presses on thought wherever it is. What
    RLVCR is compared with."""

    inner: AdvantageEstimator
    rlvcr: Rlvcr
    priced: bool = False

    @property
    def needs(self) -> frozenset[Annotation]:
        return self.inner.needs

    @property
    def min_group_size(self) -> int:
        return min_group_size(self.inner)

    def learns_from_equal_scores(self, score: float) -> bool:
        return self.priced or learns_from_equal_scores(self.inner, score)

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return self.credit(rollouts)[0]

    def credit(self, rollouts: Sequence[AnnotatedRollout]) -> tuple[list[CreditedRollout], Metrics]:
        credited, metrics = (credit_with_thinking_cost if self.priced else credit)(self.inner, rollouts)
        return credited, metrics | level_metrics(self.rlvcr.compare(rollouts))


def level_metrics(compared: LevelComparison) -> Metrics:
    """Mean A_think by the level that was used, and by level whether used or not."""
    if not compared.step_indices:
        return {}
    used_advantages = compared.used_advantages
    found = {
        "thinking/advantage": float(used_advantages.mean()),
        "thinking/frac_positive": float((used_advantages > 0).mean()),
    }
    for level in range(LEVEL_COUNT):
        mine, column = used_advantages[compared.used == level], compared.advantages[:, level]
        if len(mine):
            found[f"thinking/advantage_used_{level + 1}"] = float(mine.mean())
        if np.isfinite(column).any():
            found[f"thinking/advantage_level_{level + 1}"] = float(np.nanmean(column))
    return found


def _thinking_steps(rollout: AnnotatedRollout) -> Sequence[ThinkingStep]:
    return () if rollout.thinking is None else rollout.thinking.steps


def _with_token_advantages(rollout: CreditedRollout, tokens: Sequence[Any]) -> CreditedRollout:
    """The rollout with other advantages; a step's own is the mean of its tokens'."""
    steps = tuple(
        with_advantage(step, float(a.mean()) if len(a) else step.advantage or 0.0, step.return_to_go)
        for step, a in zip(rollout.steps, tokens, strict=True)
    )
    return CreditedRollout(rollout.annotated, steps, tuple(tokens), rollout.returns)


def _permutation(count: int, seed: str) -> list[int]:
    order = list(range(count))
    Random(seed).shuffle(order)
    return order


def _batch_name(base: Sequence[CreditedRollout]) -> str:
    """Another order for each batch, the same again in the same run."""
    return base[0].rollout.rollout_id if base else ""
