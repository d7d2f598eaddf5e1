"""GRPO: hand-worked tables and properties for any rewards."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.advantages import ESTIMATORS, Grpo, Rloo, compute_grpo_outcome_advantage
from toolwise.advantages.grpo import EPSILON, group_advantages
from toolwise.messages import Message
from toolwise.types import AnnotatedRollout, EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, Usage

SCORES = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
LABELLED = st.lists(st.tuples(SCORES, st.integers(0, 3)), min_size=1, max_size=24)


def annotated(score: float, group: str, lengths: tuple[int | None, ...] = (2,)) -> AnnotatedRollout:
    """A rollout with one step per entry of `lengths`; None is a step without sampled tokens."""
    steps = tuple(
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs=None
            if length is None
            else {"token_ids": [7] * length, "logprobs": [-1.0] * length, "prompt_ids": [1]},
        )
        for index, length in enumerate(lengths)
    )
    task = Task(task_id=group, prompt=[Message(role="user", content="?")])
    rollout = Rollout("r", group, 0, 0, task, None, steps, task.prompt, StopReason.ANSWERED, Usage())
    return AnnotatedRollout(ScoredRollout(rollout, EvaluateResult(score=score), steps))


def test_a_hand_worked_table() -> None:
    # Group a: 1, 0, 0, 1 has mean 1/2 and sample variance (4 · 1/4) / 3 = 1/3.
    # Group b: 3, 5, 10 has mean 6; deviations −3, −1, 4; sample variance 26 / 2 = 13.
    scores = [1.0, 3.0, 0.0, 5.0, 0.0, 10.0, 1.0]
    groups = ["a", "b", "a", "b", "a", "b", "a"]
    a, b = math.sqrt(1 / 3) + 1e-6, math.sqrt(13) + 1e-6
    expected = [0.5 / a, -3 / b, -0.5 / a, -1 / b, -0.5 / a, 4 / b, 0.5 / a]
    assert group_advantages(scores, groups).tolist() == pytest.approx(expected, rel=1e-12)
    assert group_advantages(scores, groups)[0] == pytest.approx(0.8660239, abs=1e-7)
    assert group_advantages(scores, groups)[5] == pytest.approx(1.1094001, abs=1e-7)


def test_without_std_the_table_is_only_centred() -> None:
    advantages = group_advantages([1, 3, 0, 5, 0, 10, 1], list("abababa"), norm_by_std=False)
    assert advantages.tolist() == pytest.approx([0.5, -3, -0.5, -1, -0.5, 4, 0.5], abs=1e-12)


def test_the_std_is_the_sample_s() -> None:
    # 0 and 2: population std 1, sample std √2.
    assert group_advantages([0.0, 2.0], "gg").tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_one_is_exactly_zero(norm_by_std: bool) -> None:
    advantages = group_advantages([0.1, 5.0, -3.7], ["a", "b", "c"], norm_by_std=norm_by_std)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_rewards_are_exactly_zero(norm_by_std: bool) -> None:
    assert sum([0.1] * 7) / 7 != 0.1  # rounding: their mean is not 0.1
    assert group_advantages([0.1] * 7, ["g"] * 7, norm_by_std=norm_by_std).tolist() == [0.0] * 7


def test_no_scores_give_no_advantages() -> None:
    assert group_advantages([], []).tolist() == []
    assert Grpo()([]).rollouts == []


def test_scores_and_groups_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError):
        group_advantages([1.0, 2.0, 3.0], ["a", "a"])


@given(LABELLED, st.randoms(use_true_random=False), st.booleans())
def test_permuting_other_groups_changes_nothing(rows: list[tuple[float, int]], rng: Random, norm: bool) -> None:
    scores, groups = [s for s, _ in rows], [g for _, g in rows]
    before = group_advantages(scores, groups, norm_by_std=norm)
    mine = [place for place, g in enumerate(groups) if g == groups[0]]
    others = [place for place, g in enumerate(groups) if g != groups[0]]
    rng.shuffle(others)
    order = mine + others
    after = group_advantages([scores[i] for i in order], [groups[i] for i in order], norm_by_std=norm)
    assert after[: len(mine)].tolist() == before[mine].tolist()
    alone = group_advantages([scores[i] for i in mine], [groups[i] for i in mine], norm_by_std=norm)
    assert alone.tolist() == before[mine].tolist()


@given(LABELLED)
def test_each_group_sums_to_zero_and_keeps_its_order(rows: list[tuple[float, int]]) -> None:
    scores, groups = [s for s, _ in rows], [g for _, g in rows]
    advantages = group_advantages(scores, groups)
    assert np.isfinite(advantages).all()
    for group in set(groups):
        mine = [i for i, g in enumerate(groups) if g == group]
        assert abs(sum(advantages[mine])) < 1e-6
        assert all(advantages[i] <= advantages[j] for i in mine for j in mine if scores[i] < scores[j])
        assert all(advantages[i] == advantages[j] for i in mine for j in mine if scores[i] == scores[j])


@given(LABELLED, st.floats(-50, 50), st.floats(0.5, 20))
def test_shifting_rewards_changes_nothing_and_scaling_only_the_unnormalised(
    rows: list[tuple[float, int]], shift: float, scale: float
) -> None:
    scores, groups = [s for s, _ in rows], [g for _, g in rows]
    moved = [scale * s + shift for s in scores]
    spread = {g: np.std([s for s, h in rows if h == g]) for g in groups}
    wide = [i for i, g in enumerate(groups) if spread[g] > 0.01]
    assert group_advantages(moved, groups)[wide] == pytest.approx(group_advantages(scores, groups)[wide], abs=1e-3)
    plain = group_advantages(scores, groups, norm_by_std=False)
    assert group_advantages(moved, groups, norm_by_std=False) == pytest.approx(scale * plain, abs=1e-9)


@given(st.lists(SCORES, min_size=2, max_size=12))
def test_a_group_s_own_std_is_what_it_is_divided_by(scores: list[float]) -> None:
    expected = (np.array(scores) - np.mean(scores)) / (np.std(scores, ddof=1) + EPSILON)
    if len(set(scores)) == 1:
        expected = np.zeros(len(scores))
    assert group_advantages(scores, ["g"] * len(scores)) == pytest.approx(expected, abs=1e-9)


def test_every_sampled_token_and_step_gets_the_rollout_s_advantage() -> None:
    credited = Grpo(norm_by_std=False)([annotated(1.0, "a", (3, None, 2)), annotated(0.0, "a", (1,))]).rollouts
    assert [a.tolist() for a in credited[0].advantages] == [[0.5, 0.5, 0.5], [], [0.5, 0.5]]
    assert [a.tolist() for a in credited[1].advantages] == [[-0.5]]
    assert [a.dtype for a in credited[0].advantages] == [np.float32] * 3
    assert [step.advantage for step in credited[0].steps] == [0.5, 0.5, 0.5]
    assert credited[0].rollout.rollout_id == "r"


def test_tokens_and_turns_do_not_weigh_in_the_group_s_statistics() -> None:
    """A rollout that read more tool output, or took more turns, is still one rollout."""
    short = Grpo()([annotated(1.0, "a", (1,)), annotated(0.0, "a", (1,))]).rollouts
    long = Grpo()([annotated(1.0, "a", (9, 9, 9)), annotated(0.0, "a", (1,))]).rollouts
    assert short[1].steps[0].advantage == long[1].steps[0].advantage
    assert short[0].steps[0].advantage == long[0].steps[0].advantage


def test_crediting_leaves_its_input_alone() -> None:
    given_ = [annotated(1.0, "a", (2,)), annotated(0.0, "a", (2,))]
    Grpo()(given_)
    assert all(step.advantage is None for r in given_ for step in r.scored.steps)


def test_a_rollout_without_a_score_is_a_mistake_of_the_caller() -> None:
    scored = annotated(1.0, "a").scored
    unscored = AnnotatedRollout(ScoredRollout(scored.rollout, EvaluateResult(score=None), scored.steps))
    with pytest.raises(ValueError, match="no score"):
        Grpo()([unscored])


def test_the_estimator_is_in_the_table_and_needs_nothing_of_the_learner() -> None:
    assert isinstance(ESTIMATORS["grpo"](), Grpo)
    assert Grpo().needs == frozenset()


# Over tensors.


def test_tensor_form_hand_worked() -> None:
    rewards = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 9.0], [0.0, 4.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1]])
    # Scores under the mask: 1, 0, 4. The first two are a group: mean 1/2, sample std √(1/2).
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, ["a", "a", "b"])
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = torch.tensor([[half, half, half], [-half, -half, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=0)
    assert torch.equal(advantages, returns)
    assert advantages.data_ptr() != returns.data_ptr()
    assert advantages.shape == rewards.shape
    assert advantages.dtype == rewards.dtype


def test_tensor_form_without_std() -> None:
    rewards = torch.tensor([[3.0], [1.0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(2, 1), [0, 0], norm_by_std=False)
    assert advantages.tolist() == [[1.0], [-1.0]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_tensor_form_takes_any_kind_of_mask(kind: torch.dtype) -> None:
    mask = torch.tensor([[1, 0], [1, 1]]).to(kind)
    advantages, _ = compute_grpo_outcome_advantage(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), mask, "gg")
    assert advantages[0, 1] == 0.0
    assert advantages[0, 0] > 0.7


def test_tensor_form_of_whole_number_rewards_is_not_cut_down_to_whole_numbers() -> None:
    advantages, _ = compute_grpo_outcome_advantage(torch.tensor([[1], [0]]), torch.ones(2, 1), "gg", norm_by_std=False)
    assert advantages.tolist() == [[0.5], [-0.5]]


def test_tensor_form_sums_in_float64() -> None:
    """Rewards of seven equal rows must be equal, whatever order their tokens are added up in."""
    rewards = torch.full((7, 50), 0.1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(7, 50), ["g"] * 7)
    assert torch.equal(advantages, torch.zeros(7, 50))


def test_tensor_form_ignores_what_is_off_the_mask_even_where_it_is_not_a_number() -> None:
    rewards = torch.tensor([[1.0, math.nan], [0.0, math.inf]])
    advantages, returns = compute_grpo_outcome_advantage(rewards, torch.tensor([[1, 0], [1, 0]]), "gg")
    assert torch.isfinite(advantages).all()
    assert torch.isfinite(returns).all()
    assert advantages[:, 1].tolist() == [0.0, 0.0]


def test_tensor_form_of_a_fully_masked_row_is_zero_and_finite() -> None:
    advantages, _ = compute_grpo_outcome_advantage(torch.ones(3, 2), torch.tensor([[1, 1], [0, 0], [1, 0]]), "ggg")
    assert torch.isfinite(advantages).all()
    assert advantages[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("mask", "index"),
    [(torch.ones(2, 3), "ab"), (torch.ones(2, 2), "abc"), (torch.ones(2, 2), "a"), (torch.ones(3, 2), "ab")],
)
def test_tensor_form_refuses_shapes_that_differ(mask: torch.Tensor, index: str) -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        compute_grpo_outcome_advantage(torch.ones(2, 2), mask, index)


def test_tensor_form_leaves_its_inputs_alone() -> None:
    rewards, mask, index = (
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([[True, False], [True, True]]),
        ["a", "a"],
    )
    copies = rewards.clone(), mask.clone(), list(index)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    advantages.fill_(5.0)
    assert torch.equal(rewards, copies[0])
    assert torch.equal(mask, copies[1])
    assert index == copies[2]


@settings(max_examples=50)
@given(st.lists(st.tuples(SCORES, st.integers(0, 2)), min_size=1, max_size=10))
def test_tensor_form_agrees_with_the_estimator(rows: list[tuple[float, int]]) -> None:
    scores, groups = [s for s, _ in rows], [g for _, g in rows]
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None] * torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(len(rows), 2), groups)
    credited = Grpo()([annotated(s, str(g)) for s, g in rows]).rollouts
    assert advantages[:, 0].tolist() == pytest.approx([float(c.advantages[0][0]) for c in credited], abs=1e-6)


# Leave one out.


def test_leave_one_out_hand_worked() -> None:
    # 3, 5, 10 against the means of the others: 7.5, 6.5, 4.
    assert group_advantages([3, 5, 10], "ggg", leave_one_out=True).tolist() == pytest.approx([-4.5, -1.5, 6])
    assert Rloo()([annotated(s, "g") for s in (3.0, 5.0, 10.0)]).rollouts[2].steps[0].advantage == pytest.approx(6)
    rewards = torch.tensor([[3.0], [5.0], [10.0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), "ggg", leave_one_out=True)
    assert advantages.flatten().tolist() == pytest.approx([-4.5, -1.5, 6])


@given(LABELLED)
def test_leave_one_out_is_each_score_against_the_mean_of_the_others(rows: list[tuple[float, int]]) -> None:
    scores, groups = [s for s, _ in rows], [g for _, g in rows]
    found = group_advantages(scores, groups, leave_one_out=True)
    for i, (score, group) in enumerate(rows):
        others = [s for j, (s, g) in enumerate(rows) if g == group and j != i]
        expected = score - sum(others) / len(others) if others else 0.0
        assert found[i] == pytest.approx(expected, abs=1e-9)


def test_leave_one_out_of_equal_rewards_or_of_one_is_exactly_zero() -> None:
    assert group_advantages([0.1] * 7 + [4.0], ["g"] * 7 + ["h"], leave_one_out=True).tolist() == [0.0] * 8


def test_a_score_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="score 1 is not a finite number"):
        group_advantages([1.0, math.nan], "gg")


def test_groups_named_by_a_tensor_go_by_value() -> None:
    rewards, mask = torch.tensor([[1.0], [0.0], [5.0]]), torch.ones(3, 1)
    named, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a", "b"])
    numbered, _ = compute_grpo_outcome_advantage(rewards, mask, torch.tensor([4, 4, 6]))
    assert torch.equal(named, numbered)
