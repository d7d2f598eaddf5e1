"""The parts of an advantage add up to what the update uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rlvcr_cases import random_batch

from toolwise.advantages import Gae, Gigpo, Grpo, Hdpo, Hgpo, Pareto, ReinforcePlusPlus, Rloo, Rlvcr
from toolwise.advantages.parts import attach_parts, scaled_parts
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AnnotatedRollout, CreditedRollout, RolloutThinking, ThinkingStep

ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": Grpo(),
    "dr_grpo": Grpo(norm_by_std=False),
    "rloo": Rloo(),
    "gigpo": Gigpo(state_anchor="auto"),
    "gigpo_mean": Gigpo(combine="additive", normalization="mean_norm", terminal_score="add"),
    "hgpo": Hgpo(anchor_history=2),
    "gae": Gae(),
    "gae_turns": Gae(per="turn", whiten=False, gamma=0.9),
    "reinforce": ReinforcePlusPlus(gamma=0.9),
    "hdpo": Hdpo(),
    "pareto": Pareto(),
}


def batch(step: Any, rollout: Any, *, costs: bool) -> list[AnnotatedRollout]:
    """Groups of rollouts in few states, which pay for KL and for thinking if `costs`."""
    rng, found = np.random.default_rng(3), []
    for group in range(4):
        for _ in range(5):
            counts = rng.integers(0, 5, int(rng.integers(1, 4))).tolist()
            counts[0] += 1
            steps = [
                step(i, state=int(rng.integers(0, 3)), tokens=n, base_reward=float(rng.normal()))
                for i, n in enumerate(counts)
            ]
            arrays = [[rng.normal(size=n).tolist() for n in counts] for _ in range(2)]
            one = rollout(
                float(rng.integers(0, 2)), f"g{group}", steps, values=arrays[0], ref=arrays[1], cost=float(rng.random())
            )
            thinking = tuple(ThinkingStep(2, int(rng.integers(0, 9)), 1) for _ in counts)
            if costs:
                one = replace(one, kl_coef=0.1, thinking=RolloutThinking(thinking, price=0.05, charged=True))
            found.append(one)
    return found


def worst(credited: Sequence[CreditedRollout]) -> float:
    gaps = [0.0]
    for rollout in credited:
        used = np.concatenate([np.zeros(0), *rollout.advantages])
        total = sum(scaled_parts(rollout).values(), np.zeros(len(used)))
        gaps.append(float(np.abs(total - used).max(initial=0.0)))
    return max(gaps)


@pytest.mark.parametrize("costs", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_parts_add_up_to_the_advantages(name: str, costs: bool, step: Any, rollout: Any) -> None:
    credited = ESTIMATORS[name](batch(step, rollout, costs=costs)).rollouts
    assert all(r.parts is not None for r in credited)
    assert worst(credited) < 1e-6
    used = np.concatenate([a for r in credited for a in r.advantages])
    assert np.abs(used).max() > 0.1


@pytest.mark.parametrize("name", ["grpo", "gigpo", "hgpo", "gae", "reinforce"])
def test_costs_are_parts_of_their_own(name: str, step: Any, rollout: Any) -> None:
    parts = ESTIMATORS[name](batch(step, rollout, costs=True)).rollouts[0].parts
    assert parts is not None
    assert {"trajectory", "price", "kl"} <= set(parts.parts)
    free = ESTIMATORS[name](batch(step, rollout, costs=False)).rollouts[0].parts
    assert free is not None
    assert not {"price", "kl"} & set(free.parts)


def test_a_scale_is_a_factor(step: Any, rollout: Any) -> None:
    """Scores 1 and 0: half above and below the mean, and a sample std of 1 / √2."""
    pair = [rollout(score, "g", [step(tokens=2)]) for score in (1.0, 0.0)]
    first, second = (r.parts for r in Grpo()(pair).rollouts)
    assert first is not None
    assert second is not None
    assert first.parts["trajectory"].tolist() == [0.5, 0.5]
    assert second.parts["trajectory"].tolist() == [-0.5, -0.5]
    assert first.factors["group_scale"] == pytest.approx([2**0.5] * 2, rel=1e-5)


def test_gigpo_says_which_steps_share_a_state(step: Any, rollout: Any) -> None:
    steps = [[step(0, state="a"), step(1, state="b")], [step(0, state="a"), step(1, state="c")]]
    credited = Gigpo()([rollout(float(i), "g", own) for i, own in enumerate(steps)]).rollouts
    first, second = (r.parts.anchors for r in credited if r.parts is not None and r.parts.anchors is not None)
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("settings", [{}, {"gate": "signed"}, {"combine": "reweight"}])
@pytest.mark.parametrize("seed", range(4))
def test_thinking_is_a_part_or_a_factor(seed: int, settings: dict[str, Any]) -> None:
    credited = Rlvcr(**settings)(random_batch(seed)).rollouts
    assert worst(credited) < 1e-6
    named = {name for r in credited if r.parts is not None for name in (*r.parts.parts, *r.parts.factors)}
    assert ("reweighting" if "combine" in settings else "thinking") in named
    assert any(r.parts is not None and r.parts.levels for r in credited)


def test_what_thinking_adds_to_an_estimator_that_names_no_parts(step: Any) -> None:
    class Plain(Grpo):
        def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> Any:
            found = super().__call__(rollouts)
            return replace(found, rollouts=[replace(r, parts=None) for r in found.rollouts])

    credited = Rlvcr(trajectory=Plain())(random_batch(1)).rollouts
    assert worst(credited) < 1e-6


def test_parts_are_given_per_rollout_step_or_token(step: Any, rollout: Any) -> None:
    credited = Grpo()([rollout(1.0, "g", [step(0, tokens=1), step(1, tokens=2)]), rollout(0.0, "g", [step()])]).rollouts
    for per, values, expected in (
        ("rollout", [1.0, 2.0], [[1, 1, 1], [2]]),
        ("step", [1.0, 2.0, 3.0], [[1, 2, 2], [3]]),
        ("token", [1.0, 2.0, 3.0, 4.0], [[1, 2, 3], [4]]),
    ):
        found = attach_parts(credited, {"x": np.array(values)}, per=per)  # type: ignore[arg-type]
        assert [r.parts.parts["x"].tolist() for r in found if r.parts is not None] == expected
