"""GiGPO: GRPO plus step-level credit that compares each step with other steps taken in the same state.

    G_t   = r_t + γ · G_{t+1}                          within a rollout; its `return_to_go`
    A_E   = normalized total                           over the rollouts of one group (task)
    A_S   = normalized G                               over all steps of the group in one anchor state, within and
                                                       across rollouts
    A     = ω · A_E + (1 − ω) · A_S                    combine = "convex"
    A     = A_E + w · A_S                              combine = "additive", as in the paper; w is step_advantage_w

Paper: Feng et al. 2025, arXiv 2505.10978.

Normalization: mean_std_norm, (x − mean) / (std + 1e-6) with the sample std, or mean_norm, x − mean. A step alone in its
state, a rollout alone in its group, or equal values give exactly 0. Statistics are float64.

Shapes: one score and group id per rollout; one reward, anchor, advantage and return per step; all sampled tokens of a
step get its advantage. Grouping: A_E by group id, A_S by (group id, anchor), so nothing is compared across tasks.

`anchors.py` defines states; `step_rewards.py` step rewards, where the final score goes, and what each step pays,
which enters both A_E and A_S.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

import numpy as np

from toolwise.advantages.anchors import StateAnchor, StateHash, as_anchor
from toolwise.advantages.arrays import (
    Doubles,
    Ints,
    check_choice,
    check_fraction,
    compact_codes,
    discounted_sums,
    normalize,
    pair_codes,
)
from toolwise.advantages.assign import credit_steps, with_advantage
from toolwise.advantages.parts import attach_parts
from toolwise.advantages.step_rewards import (
    BuiltinEstimator,
    Episodes,
    episode_parts,
    episodes_from_rollouts,
    episodes_of,
)
from toolwise.config.algorithm import Combination, GigpoOptions, StepNormalization
from toolwise.config.imports import load_reference
from toolwise.protocols import Metrics
from toolwise.types import AnnotatedRollout, CreditedBatch, StepData, TerminalScore

StepAdvantageFn = Callable[[Doubles, Ints, Ints, StepNormalization, Doubles | None], Doubles]
"""Computes A_S from returns, states, lengths, the normalization, and the returns whose spread decides the scale."""
MAX_SINGLETON_SHARE = 0.9
BLOCK_STEPS = 32_768
"""Steps processed at a time."""


class SingletonAnchorsWarning(UserWarning):
    """Step-level advantages are nearly all 0 because hardly any two steps share a state."""


@dataclass(frozen=True, slots=True)
class StepCredit:
    """GiGPO's result: one entry per step, except for `episode`, which has one per rollout."""

    advantages: Doubles
    returns: Doubles
    episode: Doubles
    step: Doubles
    anchors: Ints
    """Code of each step's (group, state); not every code occurs."""

    def metrics(self) -> Metrics:
        if len(self.anchors) == 0:
            return {}
        sizes = np.bincount(self.anchors)
        sizes = sizes[sizes > 0]
        return {
            "gigpo/n_anchor_groups": float(len(sizes)),
            "gigpo/mean_anchor_size": float(sizes.mean()),
            "gigpo/frac_singleton": float((sizes == 1).mean()),
            "gigpo/frac_steps_alone": float((sizes == 1).sum() / len(self.anchors)),
            "gigpo/mean_abs_episode_advantage": float(np.abs(self.episode).mean()),
            "gigpo/mean_abs_step_advantage": float(np.abs(self.step).mean()),
        }


def same_state_advantages(
    returns: Doubles, states: Ints, lengths: Ints, mode: StepNormalization, scale_of: Doubles | None = None
) -> Doubles:
    """A_S: returns normalized within the same state."""
    return normalize(returns, states, mode, scale_of=scale_of)


def check_settings(omega: float, gamma: float, combine: str, normalization: str) -> None:
    check_fraction("gamma", gamma)
    check_fraction("omega", omega)
    check_choice("combine", combine, get_args(Combination))
    check_choice("normalization", normalization, get_args(StepNormalization))


def gigpo_advantages(
    episodes: Episodes,
    anchors: Ints,
    *,
    omega: float = 0.5,
    gamma: float = 0.95,
    combine: Combination = "convex",
    step_advantage_w: float = 1.0,
    normalization: StepNormalization = "mean_std_norm",
    step_advantages: StepAdvantageFn = same_state_advantages,
) -> StepCredit:
    """The array core, linear in the number of steps. `anchors` holds any integer code per step."""
    check_settings(omega, gamma, combine, normalization)
    episode_weight, step_weight = _weights(omega, combine, step_advantage_w)
    parts: list[StepCredit] = []
    state_count = 0
    for block, block_anchors in split_into_blocks(episodes, anchors):
        rollout_of_step = block.rollout_of_step
        states, count = pair_codes(block.groups[rollout_of_step], block_anchors)
        returns = discounted_sums(block.rewards, block.lengths, gamma)
        episode = normalize(block.scores, compact_codes(block.groups)[0], normalization)
        step = step_advantages(returns, states, block.lengths, normalization, None)
        total = episode_weight * episode[rollout_of_step] + step_weight * step
        parts.append(StepCredit(total, returns, episode, step, states + state_count))
        state_count += count
    return StepCredit(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(StepCredit)))


def _weights(omega: float, combine: Combination, step_advantage_w: float) -> tuple[float, float]:
    """Of A_E and A_S."""
    return (omega, 1.0 - omega) if combine == "convex" else (1.0, step_advantage_w)


def split_into_blocks(episodes: Episodes, anchors: Ints) -> Iterator[tuple[Episodes, Ints]]:
    """Yields whole groups in blocks that fit the CPU cache, which halves the time.

    If the rollouts are not sorted by group, yields everything at once; the results are bitwise identical.
    """
    group_changes = np.diff(episodes.groups)
    ends = np.cumsum(episodes.lengths)
    if len(anchors) <= BLOCK_STEPS or bool((group_changes < 0).any()):
        yield episodes, anchors
        return
    group_ends = np.append(np.flatnonzero(group_changes) + 1, len(ends))
    blocks = ends[group_ends - 1] // BLOCK_STEPS
    first = step = 0
    for stop in group_ends[np.append(np.flatnonzero(np.diff(blocks)), len(group_ends) - 1)].tolist():
        end = int(ends[stop - 1])
        rows, inside = slice(first, stop), slice(step, end)
        yield (
            Episodes(episodes.scores[rows], episodes.groups[rows], episodes.lengths[rows], episodes.rewards[inside]),
            anchors[inside],
        )
        first, step = stop, end


def apply_gigpo_to_batch_steps(
    batch_of_step_data_lists: Sequence[Sequence[StepData]],
    final_scores_for_rollouts: Sequence[float | None],
    omega: float,
    gamma: float,
    state_hashing_function: StateHash | StateAnchor | str | None,
    default_step_reward: float = 0.0,
    *,
    group_ids: Sequence[Any],
    combine: Combination = "convex",
    step_advantage_w: float = 1.0,
    normalization: StepNormalization = "mean_std_norm",
    terminal_score: TerminalScore = "remainder",
    invalid_action_penalty: float = 0.0,
) -> list[list[StepData]]:
    """Copies of the steps with `advantage` and `return_to_go` set.

    `state_hashing_function` receives `step.observation_data`; None anchors on the environment's `state_key`, or else on
    the last observation. `group_ids` holds the task of each rollout. A score of None is the sum of the step rewards.
    """
    episodes = episodes_of(
        batch_of_step_data_lists,
        final_scores_for_rollouts,
        group_ids,
        terminal_score=terminal_score,
        default_step_reward=default_step_reward,
        invalid_action_penalty=invalid_action_penalty,
    )
    steps = [step for rollout in batch_of_step_data_lists for step in rollout]
    credit = gigpo_advantages(
        episodes,
        as_anchor(state_hashing_function).codes(steps, episodes.groups[episodes.rollout_of_step]),
        omega=omega,
        gamma=gamma,
        combine=combine,
        step_advantage_w=step_advantage_w,
        normalization=normalization,
    )
    warn_if_singletons(credit.metrics())
    credited = iter(map(with_advantage, steps, credit.advantages.tolist(), credit.returns.tolist()))
    return [[next(credited) for _ in rollout] for rollout in batch_of_step_data_lists]


system_apply_gigpo_to_batch_steps = apply_gigpo_to_batch_steps


@dataclass(frozen=True)
class Gigpo(GigpoOptions, BuiltinEstimator):
    """GiGPO: `adv_estimator = "gigpo"`."""

    gamma: float = 0.95
    state_anchor: str | StateHash = "auto"
    """In Python also a function."""

    uses_step_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self.omega, self.gamma, self.combine, self.normalization)
        super().__post_init__()
        self._anchor().check()
        if isinstance(self.state_anchor, str) and ":" in self.state_anchor:
            # Loaded once, so that a run keeps its function if the file is edited meanwhile.
            object.__setattr__(self, "state_anchor", load_reference(self.state_anchor, what="state_anchor"))

    def learns_from_equal_scores(self, score: float) -> bool:
        """Rollouts that all reach the goal may still differ in how fast they do."""
        return True

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        episodes = episodes_from_rollouts(rollouts, self.rewards)
        steps = [step for rollout in rollouts for step in rollout.scored.steps]
        result = gigpo_advantages(
            episodes,
            self._anchor().codes(steps, episodes.groups[episodes.rollout_of_step]),
            omega=self.omega,
            gamma=self.gamma,
            combine=self.combine,
            step_advantage_w=self.step_advantage_w,
            normalization=self.normalization,
            step_advantages=self._step_advantages,
        )
        metrics = result.metrics()
        warn_if_singletons(metrics)
        credited = credit_steps(rollouts, result.advantages, result.returns)
        parts = self._parts(rollouts, episodes, result)
        return CreditedBatch(attach_parts(credited, parts, per="step", anchors=result.anchors), metrics)

    def _parts(
        self, rollouts: Sequence[AnnotatedRollout], episodes: Episodes, result: StepCredit
    ) -> dict[str, Doubles]:
        """A_E and A_S of the rewards, and what each cost adds to both; one entry per step."""
        episode_w, step_w = _weights(self.omega, self.combine, self.step_advantage_w)
        of_step, sources = episodes.rollout_of_step, episode_parts(rollouts, self.rewards)
        if len(sources) == 1:
            return {"trajectory": episode_w * result.episode[of_step], "step": step_w * result.step}
        groups, parts = compact_codes(episodes.groups)[0], dict[str, Doubles]()
        for name, source in sources.items():
            returns = discounted_sums(source.rewards, source.lengths, self.gamma)
            step = self._step_advantages(
                returns, result.anchors, source.lengths, self.normalization, scale_of=result.returns
            )
            episode = normalize(source.scores, groups, self.normalization, scale_of=episodes.scores)[of_step]
            if name == "trajectory":
                parts |= {"trajectory": episode_w * episode, "step": step_w * step}
            else:
                parts[name] = episode_w * episode + step_w * step
        return parts

    def _anchor(self) -> StateAnchor:
        return StateAnchor(self.state_anchor, self.anchor_messages, self.anchor_similarity)

    def _step_advantages(
        self,
        returns: Doubles,
        states: Ints,
        lengths: Ints,
        mode: StepNormalization,
        scale_of: Doubles | None = None,
    ) -> Doubles:
        return same_state_advantages(returns, states, lengths, mode, scale_of)


def warn_if_singletons(metrics: Metrics) -> None:
    """The text is constant, so Python shows it once; the numbers are in the metrics of every step."""
    if metrics.get("gigpo/frac_singleton", 0.0) > MAX_SINGLETON_SHARE:
        warnings.warn(
            "more than 90 % of the anchor states occurred only once, so step-level advantages are nearly all 0 and "
            "GiGPO reduces to GRPO: the state hash is too specific (the whole history?); see gigpo/frac_steps_alone",
            SingletonAnchorsWarning,
            stacklevel=3,
        )
