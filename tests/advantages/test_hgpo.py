"""HGPO: anchors nested by the last k states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.advantages import Gigpo, Hgpo
from toolwise.advantages.arrays import CreditError
from toolwise.advantages.hgpo import nested_state_advantages
from toolwise.types import AnnotatedRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]

pytestmark = pytest.mark.filterwarnings("ignore::toolwise.advantages.SingletonAnchorsWarning")

WALKS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 1.0])), max_size=6),
        st.sampled_from("xy"),
        st.sampled_from([0.0, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=6,
)


def rollouts(step: Step, make: Make, walks: Any) -> list[AnnotatedRollout]:
    return [
        make(score, group, [step(i, state=s, base_reward=r) for i, (s, r) in enumerate(steps)])
        for steps, group, score in walks
    ]


@given(WALKS, st.sampled_from(["mean_std_norm", "mean_norm"]), st.sampled_from(["convex", "additive"]))
def test_with_no_history_it_is_gigpo_to_the_last_bit(
    step: Step, rollout: Make, walks: Any, mode: Any, how: Any
) -> None:
    given_ = rollouts(step, rollout, walks)
    flat = Gigpo(normalization=mode, combine=how)(given_).rollouts
    nested = Hgpo(normalization=mode, combine=how, anchor_history=0)(given_).rollouts
    assert [[s.advantage for s in r.steps] for r in nested] == [[s.advantage for s in r.steps] for r in flat]


def test_hand_worked(step: Step, rollout: Make) -> None:
    # Three rollouts of two steps. All meet state b; two of them came from a, one from c.
    walks = [("a", "b", 4.0), ("a", "b", 2.0), ("c", "b", 0.0)]
    made = [
        rollout(end, "g", [step(0, state=first, base_reward=0.0), step(1, state=second, base_reward=end)])
        for first, second, end in walks
    ]
    found = Hgpo(anchor_history=1, gamma=1.0, omega=0.0, normalization="mean_norm", terminal_score="never")(
        made
    ).rollouts
    # Depth 0 in b: 4, 2, 0 less 2. Depth 1, a then b: 4, 2 less 3; c then b is alone, so it has depth 0 only.
    # Weights 1 and 2: (1·2 + 2·1)/3, (1·0 + 2·(−1))/3, −2. In a: 4, 2 less 3, depth 0 only; in c: alone.
    assert [s.advantage for r in found for s in r.steps] == pytest.approx([1, 4 / 3, -1, -2 / 3, 0, -2])


def test_alpha_says_how_much_more_the_deeper_group_weighs(step: Step, rollout: Make) -> None:
    made = [
        rollout(end, "g", [step(0, state=first, base_reward=0.0), step(1, state="b", base_reward=end)])
        for first, end in (("a", 4.0), ("a", 2.0), ("c", 0.0))
    ]
    same: dict[str, Any] = {
        "anchor_history": 1,
        "gamma": 1.0,
        "omega": 0.0,
        "normalization": "mean_norm",
        "terminal_score": "never",
    }
    alike = Hgpo(depth_alpha=0.0, **same)(made).rollouts[0].steps[1].advantage
    much = Hgpo(depth_alpha=2.0, **same)(made).rollouts[0].steps[1].advantage
    assert alike == pytest.approx((2 + 1) / 2)
    assert much == pytest.approx((2 + 4 * 1) / 5)


def slow_nested(
    returns: list[list[float]], states: list[list[str]], groups: list[str], k: int, alpha: float
) -> list[float]:
    """The definition at the top of the module, with loops and mean_norm."""
    out = []
    for i, row in enumerate(returns):
        for t, mine in enumerate(row):
            total = weights = 0.0
            for d in range(min(k, t) + 1):
                key = states[i][t - d : t + 1]
                met = [
                    returns[j][u]
                    for j in range(len(returns))
                    for u in range(d, len(returns[j]))
                    if groups[j] == groups[i] and states[j][u - d : u + 1] == key
                ]
                if len(met) >= 2:
                    total += (d + 1) ** alpha * (mine - sum(met) / len(met))
                    weights += (d + 1) ** alpha
            out.append(total / weights if weights else 0.0)
    return out


@settings(deadline=None)
@given(WALKS, st.integers(0, 5), st.sampled_from([0.0, 1.0, 1.5]))
def test_agrees_with_the_definition_by_loops(step: Step, rollout: Make, walks: Any, k: int, alpha: float) -> None:
    made = rollouts(step, rollout, walks)
    found = Hgpo(anchor_history=k, depth_alpha=alpha, omega=0.0, gamma=0.9, normalization="mean_norm")(made).rollouts
    returns = [[s.return_to_go or 0.0 for s in r.steps] for r in found]
    states = [[s for s, _ in steps] for steps, _, _ in walks]
    expected = slow_nested(returns, states, [g for _, g, _ in walks], k, alpha)
    assert np.array([s.advantage for r in found for s in r.steps], dtype=float) == pytest.approx(
        np.array(expected), abs=1e-9
    )


def test_aliased_observations_are_told_apart_by_what_came_before(step: Step, rollout: Make) -> None:
    """The same door with or without the key in hand: only the history separates the two cases."""
    made = [
        rollout(float(key), "g", [step(0, state="found key" if key else "found nothing"), step(1, state="door")])
        for key in (1, 1, 0, 0)
    ]
    flat = Gigpo(omega=0.0, normalization="mean_norm")(made).rollouts
    nested = Hgpo(omega=0.0, normalization="mean_norm", anchor_history=1, depth_alpha=50.0)(made).rollouts
    assert [r.steps[1].advantage for r in flat] == [0.5, 0.5, -0.5, -0.5]
    assert [r.steps[1].advantage for r in nested] == pytest.approx([0, 0, 0, 0], abs=1e-9)


def test_more_history_than_there_are_steps_is_all_there_is(step: Step, rollout: Make) -> None:
    made = rollouts(step, rollout, [([("a", 0.0), ("b", 1.0)], "x", 1.0), ([("a", 0.0), ("b", 0.0)], "x", 0.0)])
    assert [[s.advantage for s in r.steps] for r in Hgpo(anchor_history=1)(made).rollouts] == [
        [s.advantage for s in r.steps] for r in Hgpo(anchor_history=10**6)(made).rollouts
    ]


def test_nothing_in_nothing_out_and_a_negative_history_is_refused() -> None:
    none = np.zeros(0)
    assert nested_state_advantages(none, none.astype(np.intp), none.astype(np.intp), "mean_norm", k=2).tolist() == []
    assert Hgpo()([]).rollouts == []
    with pytest.raises(CreditError, match="anchor_history is -1"):
        Hgpo(anchor_history=-1)
