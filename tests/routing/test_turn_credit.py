"""Credit for the routes of turns: a table worked out by hand, and properties."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.routing.turn_credit import TurnOutcome, credit_turns, sums_to_go

LAMBDA = {"cost": 0.5}


def outcome(rollout: str, turn: int, state: object, reward: float, cost: float, prompt: str = "p") -> TurnOutcome:
    return TurnOutcome(prompt, rollout, turn, state, reward, {"cost": cost})  # type: ignore[arg-type]


def test_a_hand_worked_table() -> None:
    # G = reward to go − 0.5 · cost to go. Rollouts a, b and c start in the same state "q"; after a search a and b have
    # read the same, c something else.
    table = [
        (outcome("a", 0, "q", 1.0, 2.0), 0.0),  # G 0.0; others 0.5 and −0.5: mean 0.0
        (outcome("a", 1, "12 mills", 1.0, 1.0), 0.5 - 1.0),  # G 0.5; b's 1.0 in the same state
        (outcome("b", 0, "q", 1.0, 1.0), 0.5 - (0.0 - 0.5) / 2),  # G 0.5
        (outcome("b", 1, "12 mills", 1.0, 0.0), 1.0 - 0.5),  # G 1.0
        (outcome("c", 0, "q", 0.0, 1.0), -0.5 - (0.0 + 0.5) / 2),  # G −0.5
        (outcome("c", 1, "nothing", 0.0, 0.0), 0.0 - (0.5 + 1.0) / 2),  # alone in its state: others at turn 1
        (outcome("c", 2, "nothing else", 0.0, 0.0), 0.0),  # alone in its state and at its turn
    ]
    credit = credit_turns([row for row, _ in table], LAMBDA)
    assert credit.advantages == pytest.approx([expected for _, expected in table])
    assert credit.by_state == (True, True, True, True, True, False, False)
    assert credit.compared == (True, True, True, True, True, True, False)
    assert credit.advantages[-1] == 0.0


def test_one_choice_alone_has_an_advantage_of_exactly_0() -> None:
    assert credit_turns([outcome("a", 0, "q", 0.7, 3.0)], LAMBDA).advantages == (0.0,)
    assert credit_turns([], LAMBDA).advantages == ()


def test_a_state_visited_twice_by_one_rollout_is_not_its_own_baseline() -> None:
    rows = [outcome("a", 0, "q", 1.0, 1.0), outcome("a", 1, "q", 1.0, 0.0)]
    assert credit_turns(rows, LAMBDA).advantages == (0.0, 0.0)
    advantages = credit_turns([*rows, outcome("b", 0, "q", 0.0, 0.0)], LAMBDA).advantages
    assert advantages == (0.5, 1.0, pytest.approx(0.0 - (0.5 + 1.0) / 2))


def test_a_turn_without_a_state_is_compared_by_turn() -> None:
    rows = [outcome("a", 0, None, 1.0, 0.0), outcome("b", 0, None, 0.0, 0.0)]
    credit = credit_turns(rows, LAMBDA)
    assert credit.advantages == (1.0, -1.0)
    assert credit.by_state == (False, False)


def test_equal_outcomes_give_exactly_0() -> None:
    rows = [outcome(str(i), 0, "q", 0.1, 0.7) for i in range(7)]
    assert credit_turns(rows, {"cost": 0.3}).advantages == (0.0,) * 7


def test_where_only_the_cost_differs_the_advantage_grows_with_lambda() -> None:
    rows = [outcome("a", 0, "q", 1.0, 1.0), outcome("b", 0, "q", 1.0, 0.0)]
    weak, strong = (credit_turns(rows, {"cost": lam}).advantages for lam in (0.001, 5.0))
    assert strong[1] == pytest.approx(5000 * weak[1])


def test_sums_to_go() -> None:
    assert sums_to_go([1.0, 0.0, 2.0]) == [3.0, 2.0, 2.0]
    assert sums_to_go([]) == []


finite = st.floats(-100, 100)
outcomes = st.lists(
    st.builds(
        outcome,
        rollout=st.sampled_from("abcd"),
        turn=st.integers(0, 2),
        state=st.sampled_from(["q", "r", None]),
        reward=finite,
        cost=st.floats(0, 10),
        prompt=st.sampled_from(["p1", "p2", "p3"]),
    ),
    max_size=12,
)


@given(outcomes, st.randoms(use_true_random=False))
def test_other_prompts_and_the_order_change_nothing(rows: Sequence[TurnOutcome], rng: object) -> None:
    every = credit_turns(rows, LAMBDA).advantages
    mine = [index for index, row in enumerate(rows) if row.prompt_id == "p1"]
    alone = credit_turns([rows[index] for index in mine], LAMBDA).advantages
    assert alone == tuple(every[index] for index in mine)
    order = list(range(len(rows)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shuffled = credit_turns([rows[index] for index in order], LAMBDA).advantages
    assert shuffled == pytest.approx([every[index] for index in order])


@given(outcomes, finite)
def test_a_reward_for_everyone_changes_nothing(rows: Sequence[TurnOutcome], shift: float) -> None:
    moved = [outcome(r.rollout_id, r.turn, r.state, r.reward + shift, r.costs["cost"], r.prompt_id) for r in rows]
    before, after = (credit_turns(each, LAMBDA).advantages for each in (rows, moved))
    assert after == pytest.approx(before, abs=1e-9)


@given(outcomes)
def test_advantages_in_a_state_of_single_visits_add_up_to_0(rows: Sequence[TurnOutcome]) -> None:
    one_state = {(r.rollout_id): outcome(r.rollout_id, 0, "q", r.reward, r.costs["cost"]) for r in rows}
    assert sum(credit_turns(list(one_state.values()), LAMBDA).advantages) == pytest.approx(0.0, abs=1e-9)
