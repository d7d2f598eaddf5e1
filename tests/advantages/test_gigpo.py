"""GiGPO: hand-worked tables, an independent slow implementation, invariants, and pitfalls."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.advantages import (
    Gigpo,
    SingletonAnchorsWarning,
    StateAnchor,
    apply_gigpo_to_batch_steps,
    system_apply_gigpo_to_batch_steps,
)
from toolwise.advantages import gigpo as module
from toolwise.advantages.arrays import CreditError
from toolwise.advantages.gigpo import gigpo_advantages
from toolwise.advantages.step_rewards import Episodes, episodes_of
from toolwise.messages import Message
from toolwise.types import AnnotatedRollout, CreditedBatch, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]
ON_STATE = None
"""No hashing function: the environment's own state_key."""

pytestmark = pytest.mark.filterwarnings("ignore::toolwise.advantages.SingletonAnchorsWarning")


# The paper's equations, sharing nothing with the module under test.


def slow_norm(values: list[float], mine: float, mode: str) -> float:
    if len(values) < 2 or all(v == values[0] for v in values):
        return 0.0
    mean = math.fsum(values) / len(values)
    if mode == "mean_norm":
        return mine - mean
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return (mine - mean) / (std + 1e-6)


def slow_gigpo(
    states: list[list[str]],
    base: list[list[float | None]],
    valid: list[list[bool]],
    scores: list[float],
    groups: list[str],
    *,
    omega: float,
    gamma: float,
    combine: str,
    w: float,
    mode: str,
    terminal: str,
    default: float,
    penalty: float,
) -> list[list[tuple[float, float]]]:
    """(advantage, return) of every step, by loops."""
    returns: list[list[float]] = []
    totals: list[float] = []
    for i, rewards in enumerate(base):
        given_rewards = math.fsum(r for r in rewards if r is not None)
        at_end = {"remainder": scores[i] - given_rewards, "add": scores[i], "never": 0.0}[terminal]
        extra = math.fsum(
            (default if r is None else 0.0) - (0.0 if ok else penalty) for r, ok in zip(rewards, valid[i], strict=True)
        )
        totals.append(scores[i] + extra + (given_rewards if terminal == "add" else 0.0))
        found = []
        for t in range(len(rewards)):
            total = 0.0
            for later in range(t, len(rewards)):
                earned = rewards[later]
                r = default if earned is None else earned
                r += at_end if later == len(rewards) - 1 else 0.0
                r -= 0.0 if valid[i][later] else penalty
                total += gamma ** (later - t) * r
            found.append(total)
        returns.append(found)
    out = []
    for i, mine in enumerate(returns):
        peers = [j for j in range(len(scores)) if groups[j] == groups[i]]
        compared = [totals[j] for j in peers]
        a_e = 0.0 if max(compared) - min(compared) < 1e-12 else slow_norm(compared, totals[i], mode)
        row = []
        for t, g in enumerate(mine):
            met = [returns[j][u] for j in peers for u in range(len(returns[j])) if states[j][u] == states[i][t]]
            # Treat returns that differ only by rounding as equal: the slow sums round differently.
            a_s = 0.0 if max(met) - min(met) < 1e-12 else slow_norm(met, g, mode)
            row.append((omega * a_e + (1 - omega) * a_s if combine == "convex" else a_e + w * a_s, g))
        out.append(row)
    return out


REWARD = st.none() | st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0])
STEP = st.tuples(st.sampled_from("abc"), REWARD, st.booleans())
ROLLOUT = st.tuples(st.lists(STEP, max_size=6), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from("xyz"))
BATCH = st.lists(ROLLOUT, min_size=1, max_size=8)
MODES = list(itertools.product(["convex", "additive"], ["mean_std_norm", "mean_norm"], ["remainder", "add", "never"]))


def built(step: Step, batch: Any) -> tuple[list[list[StepData]], list[float], list[str]]:
    lists = [
        [step(i, state=s, base_reward=r, info={"is_action_valid": ok}) for i, (s, r, ok) in enumerate(steps)]
        for steps, _, _ in batch
    ]
    return lists, [score for _, score, _ in batch], [group for _, _, group in batch]


@pytest.mark.parametrize(("combine", "mode", "terminal"), MODES)
@settings(max_examples=25, deadline=None)
@given(
    batch=BATCH,
    omega=st.floats(0, 1),
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    penalty=st.sampled_from([0.0, 0.1]),
    default=st.sampled_from([0.0, -0.25]),
)
def test_agrees_with_the_slow_implementation(
    step: Step,
    combine: Any,
    mode: Any,
    terminal: Any,
    batch: Any,
    omega: float,
    gamma: float,
    penalty: float,
    default: float,
) -> None:
    lists, scores, groups = built(step, batch)
    found = apply_gigpo_to_batch_steps(
        lists,
        scores,
        omega,
        gamma,
        ON_STATE,
        default,
        group_ids=groups,
        combine=combine,
        step_advantage_w=0.7,
        normalization=mode,
        terminal_score=terminal,
        invalid_action_penalty=penalty,
    )
    expected = slow_gigpo(
        [[s for s, _, _ in steps] for steps, _, _ in batch],
        [[r for _, r, _ in steps] for steps, _, _ in batch],
        [[ok for _, _, ok in steps] for steps, _, _ in batch],
        scores,
        groups,
        omega=omega,
        gamma=gamma,
        combine=combine,
        w=0.7,
        mode=mode,
        terminal=terminal,
        default=default,
        penalty=penalty,
    )
    assert [len(r) for r in found] == [len(r) for r in lists]
    flat = [(s.advantage, s.return_to_go) for r in found for s in r]
    wanted = [pair for row in expected for pair in row]
    assert np.array(flat) == pytest.approx(np.array(wanted), abs=1e-9)


# Hand-worked.


def table(step: Step) -> tuple[list[list[StepData]], list[float], list[str]]:
    """Task x: one rollout goes s → t → goal, one s → t → t and fails. Task y has the same states but is separate."""
    lists = [
        [step(0, state="s"), step(1, state="t")],
        [step(0, state="s"), step(1, state="t"), step(2, state="t")],
        [step(0, state="s")],
        [step(0, state="t")],
    ]
    return lists, [1.0, 0.0, 8.0, 4.0], ["x", "x", "y", "y"]


def test_hand_worked_table_centred(step: Step) -> None:
    lists, scores, groups = table(step)
    found = apply_gigpo_to_batch_steps(lists, scores, 0.5, 0.5, ON_STATE, group_ids=groups, normalization="mean_norm")
    # x: G = (1/2, 1) and (0, 0, 0). A_E = ±1/2. State s: 1/2 and 0, mean 1/4. State t: 1, 0, 0, mean 1/3.
    # y: A_E = ±2; each step is alone in its state, although task x was there too: A_S = 0.
    assert [s.return_to_go for r in found for s in r] == [0.5, 1, 0, 0, 0, 8, 4]
    assert [s.advantage for r in found for s in r] == pytest.approx(
        [
            0.5 * 0.5 + 0.5 * 0.25,
            0.5 * 0.5 + 0.5 * 2 / 3,
            -0.5 * 0.5 - 0.5 * 0.25,
            -0.5 * 0.5 - 0.5 / 3,
            -0.5 * 0.5 - 0.5 / 3,
            0.5 * 2,
            -0.5 * 2,
        ],
        abs=1e-12,
    )


def test_hand_worked_table_normalised_and_additive(step: Step) -> None:
    lists, scores, groups = table(step)
    found = apply_gigpo_to_batch_steps(
        lists, scores, 0.123, 0.5, ON_STATE, group_ids=groups, combine="additive", step_advantage_w=2.0
    )
    # A_E of x: ±(1/2) / √(1/2). State s: ±(1/4) / √(1/8) = ±1/√2. State t: 1, 0, 0 has sample variance 1/3.
    half = 1 / math.sqrt(2)
    t = math.sqrt(1 / 3)
    assert [s.advantage for r in found[:2] for s in r] == pytest.approx(
        [
            half + 2 * half,
            half + 2 * (2 / 3) / t,
            -half - 2 * half,
            -half - 2 * (1 / 3) / t,
            -half - 2 * (1 / 3) / t,
        ],
        abs=1e-4,
    )
    assert [s.advantage for r in found[2:] for s in r] == pytest.approx([half, -half], abs=1e-5)


def test_omega_one_is_grpo_and_omega_zero_is_steps_alone(step: Step) -> None:
    lists, scores, groups = table(step)
    whole = apply_gigpo_to_batch_steps(lists, scores, 1.0, 0.5, ON_STATE, group_ids=groups, normalization="mean_norm")
    assert [s.advantage for r in whole for s in r] == [0.5, 0.5, -0.5, -0.5, -0.5, 2, -2]
    steps = apply_gigpo_to_batch_steps(lists, scores, 0.0, 0.5, ON_STATE, group_ids=groups, normalization="mean_norm")
    assert [s.advantage for r in steps for s in r][:1] == [0.25]
    assert [s.advantage for r in steps for s in r][5:] == [0, 0]


# Invariants.


@given(BATCH, st.randoms(use_true_random=False))
def test_other_groups_change_nothing(step: Step, batch: Any, rng: Random) -> None:
    mine = [r for r in batch if r[2] == batch[0][2]]
    others = [r for r in batch if r[2] != batch[0][2]]
    rng.shuffle(others)

    def found(rows: Any) -> list[Any]:
        lists, scores, groups = built(step, rows)
        credited = apply_gigpo_to_batch_steps(lists, scores, 0.4, 0.9, ON_STATE, group_ids=groups)
        return [[(s.advantage, s.return_to_go) for s in r] for r in credited]

    assert found(mine + others)[: len(mine)] == found(mine)
    mixed = found(batch)
    assert [row for row, r in zip(mixed, batch, strict=True) if r[2] == batch[0][2]] == found(mine)


@given(BATCH)
def test_nothing_is_ever_not_a_number(step: Step, batch: Any) -> None:
    lists, scores, groups = built(step, batch)
    found = apply_gigpo_to_batch_steps(lists, scores, 0.4, 0.9, ON_STATE, group_ids=groups)
    assert all(math.isfinite(s.advantage or 0) and math.isfinite(s.return_to_go or 0) for r in found for s in r)


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=2, max_size=6), st.floats(-5, 5))
def test_shifting_scores_moves_neither_level_where_lengths_are_equal(
    step: Step, states: list[list[str]], shift: float
) -> None:
    """A score is discounted back to each step; only steps equally far from the end shift equally."""
    lists = [[step(0, state=s[0])] for s in states]
    scores = [float(i % 3) for i in range(len(states))]
    before, after = (
        apply_gigpo_to_batch_steps(
            lists, [s + by for s in scores], 0.5, 0.9, ON_STATE, group_ids=["g"] * len(lists), normalization="mean_norm"
        )
        for by in (0.0, shift)
    )
    assert [s.advantage for r in after for s in r] == pytest.approx([s.advantage for r in before for s in r], abs=1e-9)


@given(BATCH, st.floats(0.5, 20))
def test_scaling_rewards_scales_the_centred_form(step: Step, batch: Any, scale: float) -> None:
    scaled = [
        ([(s, None if r is None else r * scale, ok) for s, r, ok in steps], sc * scale, g) for steps, sc, g in batch
    ]
    both = []
    for rows in (batch, scaled):
        lists, scores, groups = built(step, rows)
        credited = apply_gigpo_to_batch_steps(
            lists, scores, 0.5, 0.9, ON_STATE, group_ids=groups, normalization="mean_norm"
        )
        both.append(np.array([s.advantage for r in credited for s in r], dtype=np.float64))
    assert both[1] == pytest.approx(both[0] * scale, abs=1e-8)


def test_a_group_of_one_is_exactly_zero(step: Step) -> None:
    lists = [[step(0, state="a"), step(1, state="b")], [step(0, state="a")]]
    found = apply_gigpo_to_batch_steps(lists, [0.1, 0.3], 0.5, 0.9, ON_STATE, group_ids=["p", "q"])
    assert [s.advantage for r in found for s in r] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["mean_std_norm", "mean_norm"])
def test_equal_rewards_are_exactly_zero(step: Step, mode: Any) -> None:
    lists = [[step(i, state=f"s{i}", base_reward=0.1) for i in range(3)] for _ in range(7)]
    found = apply_gigpo_to_batch_steps(lists, [0.1] * 7, 0.5, 0.95, ON_STATE, group_ids="g" * 7, normalization=mode)
    assert {s.advantage for r in found for s in r} == {0.0}


def test_no_rollouts_and_rollouts_without_steps(step: Step) -> None:
    assert apply_gigpo_to_batch_steps([], [], 0.5, 0.9, ON_STATE, group_ids=[]) == []
    found = apply_gigpo_to_batch_steps([[], [step(state="s")]], [1.0, 0.0], 1.0, 0.9, ON_STATE, group_ids="gg")
    assert [len(r) for r in found] == [0, 1]
    assert found[1][0].advantage == pytest.approx(-1 / math.sqrt(2), abs=1e-5)  # the empty rollout keeps its score


def test_the_same_state_twice_in_one_rollout_is_compared_with_itself(step: Step) -> None:
    lists = [[step(0, state="s"), step(1, state="s")]]
    found = apply_gigpo_to_batch_steps(lists, [1.0], 0.0, 0.5, ON_STATE, group_ids="g", normalization="mean_norm")
    assert [s.advantage for s in found[0]] == [-0.25, 0.25]


def test_inputs_are_left_alone_and_the_rest_of_a_step_is_kept(step: Step) -> None:
    lists, scores, groups = table(step)
    before = [[s.model_dump() for s in r] for r in lists]
    found = apply_gigpo_to_batch_steps(lists, scores, 0.5, 0.5, ON_STATE, group_ids=groups)
    assert [[s.model_dump() for s in r] for r in lists] == before
    for a, b in zip(lists[1], found[1], strict=True):
        assert a is not b
        assert a.model_dump(exclude={"advantage", "return_to_go"}) == b.model_dump(
            exclude={"advantage", "return_to_go"}
        )
        assert StepData.model_validate(b.model_dump()).advantage == b.advantage


def test_the_system_name_is_an_alias() -> None:
    assert system_apply_gigpo_to_batch_steps is apply_gigpo_to_batch_steps


def test_group_ids_are_required(step: Step) -> None:
    with pytest.raises(TypeError, match="group_ids"):
        apply_gigpo_to_batch_steps([[step()]], [1.0], 0.5, 0.9, ON_STATE)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"omega": 1.5}, "omega is 1.5"),
        ({"gamma": -0.1}, "gamma is -0.1"),
        ({"combine": "sum"}, "combine is 'sum'; choose one of convex, additive"),
        ({"normalization": "std"}, "normalization is 'std'; choose one of mean_std_norm, mean_norm"),
        ({"terminal_score": "yes"}, "terminal_score is 'yes'"),
        ({"group_ids": ["a", "b"]}, "2 group ids"),
        ({"final_scores_for_rollouts": [math.nan]}, "final score of rollout 0 is not a finite number"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(step: Step, wrong: dict[str, Any], told: str) -> None:
    given_ = {
        "batch_of_step_data_lists": [[step(state="s")]],
        "final_scores_for_rollouts": [1.0],
        "omega": 0.5,
        "gamma": 0.9,
        "state_hashing_function": None,
        "group_ids": ["a"],
    }
    with pytest.raises(CreditError, match=told) as caught:
        apply_gigpo_to_batch_steps(**(given_ | wrong))
    assert "\n" not in str(caught.value)


# Large batches are processed in blocks.


@pytest.mark.parametrize("in_order", [True, False])
def test_blocks_change_nothing_to_the_last_bit(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 200)
    groups = np.sort(rng.integers(0, 40, 200)) if in_order else rng.integers(0, 40, 200)
    episodes = Episodes(rng.normal(size=200), groups, lengths, rng.normal(size=int(lengths.sum())))
    anchors = rng.integers(0, 5, int(lengths.sum()))
    whole = gigpo_advantages(episodes, anchors)
    monkeypatch.setattr(module, "BLOCK_STEPS", 50)
    pieces = list(module.split_into_blocks(episodes, anchors))
    assert (len(pieces) > 5) == in_order
    parts = gigpo_advantages(episodes, anchors)
    for name in ("advantages", "returns", "episode", "step"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    assert parts.metrics() == whole.metrics()


def test_anchors_may_be_any_numbers() -> None:
    episodes = Episodes(np.array([0.0, 1.0]), np.array([0, 0]), np.array([2, 1]), np.array([0.0, 1.0, 5.0]))
    small = gigpo_advantages(episodes, np.array([0, 1, 0]))
    wide = gigpo_advantages(episodes, np.array([-(2**62), 2**62, -(2**62)]))
    assert small.advantages.tolist() == wide.advantages.tolist()


# Pitfalls of hashing.


def walk(step: Step, moves: int, name: int) -> list[StepData]:
    """A rollout that circles through three rooms in its own order."""
    seen = [Message(role="user", content="find the coin")]
    steps = []
    for i in range(moves):
        steps.append(step(i, observation_data=list(seen)))
        seen += [
            Message(role="assistant", content=f"move {name}"),
            Message(role="tool", content=f"room {(i + name) % 3}"),
        ]
    return steps


def test_hashing_the_whole_history_is_warned_about(step: Step) -> None:
    lists = [walk(step, 8, name) for name in range(6)]
    arguments: Any = (lists, [float(i % 2) for i in range(6)], 0.5, 0.95)
    with pytest.warns(SingletonAnchorsWarning, match="occurred only once"):
        dead = apply_gigpo_to_batch_steps(*arguments, lambda seen: str(list(seen)), group_ids=["g"] * 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alive = apply_gigpo_to_batch_steps(*arguments, "last_observation", group_ids=["g"] * 6)
    # With useless anchors, every step but the first (all share the prompt) gets only its episode advantage.
    assert all(len({s.advantage for s in r[1:]}) == 1 for r in dead)
    assert any(len({s.advantage for s in r[1:]}) > 1 for r in alive)


def test_the_warning_comes_once(step: Step) -> None:
    steps = [[step(i, observation_data=f"{r}/{i}") for i in range(20)] for r in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            apply_gigpo_to_batch_steps(steps, [0.0, 1.0], 0.5, 0.9, "last_observation", group_ids="gg")
    # ResourceWarnings come from sockets of other tests.
    assert len([w for w in told if w.category is not ResourceWarning]) == 1


# As an estimator over rollouts.


def test_the_estimator_spreads_a_step_s_advantage_over_its_tokens(step: Step, rollout: Make) -> None:
    rollouts = [
        rollout(1.0, "x", [step(0, state="s", tokens=3), step(1, state="t", tokens=None)]),
        rollout(0.0, "x", [step(0, state="s", tokens=1), step(1, state="t", tokens=2), step(2, state="t", tokens=0)]),
    ]
    found = Gigpo(gamma=0.5, omega=0.5, normalization="mean_norm")(rollouts).rollouts
    expected = [[0.375, 0.25 + 1 / 3], [-0.375, -0.25 - 1 / 6, -0.25 - 1 / 6]]
    assert [[s.advantage for s in r.steps] for r in found] == [pytest.approx(row) for row in expected]
    assert [[len(a) for a in r.advantages] for r in found] == [[3, 0], [1, 2, 0]]
    for r in found:
        for s, tokens in zip(r.steps, r.advantages, strict=True):
            assert tokens.dtype == np.float32
            assert tokens.tolist() == [np.float32(s.advantage)] * len(tokens)
    assert [s.return_to_go for s in found[0].steps] == [0.5, 1.0]
    assert all(s.advantage is None for r in rollouts for s in r.scored.steps)


def test_the_estimator_and_the_function_over_steps_agree(step: Step, rollout: Make) -> None:
    rng = np.random.default_rng(3)
    lists = [
        [
            step(i, state=str(rng.integers(3)), base_reward=None if rng.random() < 0.3 else float(rng.normal()))
            for i in range(int(rng.integers(1, 6)))
        ]
        for _ in range(12)
    ]
    scores, groups = rng.normal(size=12).tolist(), [str(i // 4) for i in range(12)]
    for combine, normalization, terminal in MODES:
        same: Any = {"combine": combine, "normalization": normalization, "terminal_score": terminal}
        found = Gigpo(gamma=0.8, omega=0.3, step_advantage_w=0.6, invalid_action_penalty=0.2, **same)(
            [rollout(s, g, steps) for s, g, steps in zip(scores, groups, lists, strict=True)]
        ).rollouts
        told = apply_gigpo_to_batch_steps(
            lists, scores, 0.3, 0.8, None, group_ids=groups, step_advantage_w=0.6, invalid_action_penalty=0.2, **same
        )
        assert [[s.advantage for s in r.steps] for r in found] == [[s.advantage for s in r] for r in told]


def test_a_tool_s_tokens_change_nothing(step: Step, rollout: Make) -> None:
    """What lies between the sampled tokens is in `prompt_ids`, which no estimator reads."""
    long = {"token_ids": [7], "logprobs": [-1.0], "prompt_ids": list(range(500))}
    short = [rollout(float(i), "x", [step(0, state="s"), step(1, state="t")]) for i in range(2)]
    longer = [rollout(float(i), "x", [step(0, state="s"), step(1, state="t", policy_logprobs=long)]) for i in range(2)]
    for a, b in zip(Gigpo()(short).rollouts, Gigpo()(longer).rollouts, strict=True):
        assert [x.tolist() for x in a.advantages] == [x.tolist() for x in b.advantages]
        assert [s.return_to_go for s in a.steps] == [s.return_to_go for s in b.steps]


def test_metrics_tell_how_much_the_steps_had_to_say(step: Step, rollout: Make) -> None:
    rollouts = [
        rollout(1.0, "x", [step(0, state="s"), step(1, state="t")]),
        rollout(0.0, "x", [step(0, state="s"), step(1, state="t"), step(2, state="u")]),
        rollout(0.0, "y", [step(0, state="s")]),
    ]
    metrics = Gigpo(gamma=0.5, normalization="mean_norm")(rollouts).metrics
    # States: (x, s) twice, (x, t) twice, (x, u) and (y, s) once. A_E: ±1/2, 0. A_S: ±1/4, ±1/2, 0, 0.
    assert metrics == {
        "gigpo/n_anchor_groups": 4.0,
        "gigpo/mean_anchor_size": 1.5,
        "gigpo/frac_singleton": 0.5,
        "gigpo/frac_steps_alone": pytest.approx(2 / 6),
        "gigpo/mean_abs_episode_advantage": pytest.approx(1 / 3),
        "gigpo/mean_abs_step_advantage": pytest.approx(1.5 / 6),
    }
    assert Gigpo()([]) == CreditedBatch([], {})


def test_the_estimator_takes_its_states_from_where_it_is_told(step: Step, rollout: Make) -> None:
    rollouts = [rollout(float(i), "x", [step(0, state="same", observation_data={"room": i % 2})]) for i in range(4)]
    by_key = Gigpo()(rollouts).metrics["gigpo/n_anchor_groups"]
    by_room = Gigpo(state_anchor=lambda seen: seen["room"])(rollouts).metrics["gigpo/n_anchor_groups"]
    assert (by_key, by_room) == (1.0, 2.0)


def test_similar_observations_can_be_one_anchor(step: Step, rollout: Make) -> None:
    texts = ["You see a red apple on the wooden table.", "You see a red apple on the wooden table!"]
    rollouts = [rollout(float(i), "x", [step(0, observation_data=text)]) for i, text in enumerate(texts)]
    assert Gigpo()(rollouts).metrics["gigpo/frac_singleton"] == 1.0
    assert Gigpo(anchor_similarity=0.9)(rollouts).metrics["gigpo/frac_singleton"] == 0.0


def test_a_state_anchor_can_be_given_whole(step: Step) -> None:
    lists = [[step(0, observation_data="room one")], [step(0, observation_data="room two")]]
    anchor = StateAnchor("last_observation", similarity=0.5)
    found = apply_gigpo_to_batch_steps(lists, [0.0, 1.0], 0.0, 0.9, anchor, group_ids="gg", normalization="mean_norm")
    assert [s.advantage for r in found for s in r] == [-0.5, 0.5]


def test_a_million_steps_are_no_trouble() -> None:
    """Vectorized: faster than a million iterations of a Python loop."""
    rng = np.random.default_rng(0)
    lengths = np.full(80_000, 12)
    episodes = Episodes(rng.normal(size=80_000), np.arange(80_000) // 8, lengths, rng.normal(size=int(lengths.sum())))
    found = gigpo_advantages(episodes, rng.integers(0, 30, int(lengths.sum())))
    assert np.isfinite(found.advantages).all()
    assert len(found.advantages) == 960_000


def test_episodes_of_are_what_the_array_core_takes(step: Step) -> None:
    lists, scores, groups = table(step)
    episodes = episodes_of(lists, scores, groups)
    anchors = np.array([0, 1, 0, 1, 1, 0, 1])
    found = gigpo_advantages(episodes, anchors, omega=0.5, gamma=0.5)
    told = apply_gigpo_to_batch_steps(lists, scores, 0.5, 0.5, ON_STATE, group_ids=groups)
    assert found.advantages.tolist() == [s.advantage for r in told for s in r]


def test_an_anchor_function_stays_the_one_the_run_began_with(tmp_path: Path) -> None:
    file = tmp_path / "anchor.py"
    file.write_text("def room(seen):\n    return 'old'\n")
    estimator = Gigpo(state_anchor=f"{file}:room")
    file.write_text("def room(seen):\n    return 'new'\n")
    step = StepData(system_step_index=0, observation_data={}, action_taken={}, resulting_messages_history=[])
    assert estimator._anchor().keys([step]) == ["old"]
