"""RLVCR over tensors: precomputed thinking advantages, and rows that are the levels of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rlvcr_cases import ACTION, HEAD, LEVEL, random_batch, slow_tokens

from toolwise.advantages import Grpo, Rlvcr, compute_grpo_outcome_advantage, compute_rlvcr_outcome_advantage
from toolwise.advantages.arrays import CreditError
from toolwise.advantages.rlvcr_tensors import thinking_fields
from toolwise.types import AnnotatedRollout

LENGTH = HEAD + 1 + ACTION


def field_rows(batch: list[AnnotatedRollout], width: int) -> dict[str, Any]:
    """One row per step: the episode's reward at its last token, and the `thinking_fields`."""
    steps = [(r, s) for r in batch if r.thinking for s in r.thinking.steps]
    rewards = np.zeros((len(steps), width), np.float32)
    rewards[:, LENGTH - 1] = [r.scored.score for r, _ in steps]
    mask = np.zeros((len(steps), width), bool)
    mask[:, :LENGTH] = True
    estimator = Rlvcr(step_advantage_w=0.7)
    compared = estimator.compare(batch)
    used_advantages = dict(zip(compared.step_indices, compared.used_advantages.tolist(), strict=True))
    step_indices = [(i, j) for i, r in enumerate(batch) if r.thinking for j in range(len(r.thinking.steps))]
    fields = thinking_fields(
        [s for _, s in steps],
        [LENGTH] * len(steps),
        advantages=[used_advantages.get(p, np.nan) for p in step_indices],
        width=width,
    )
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "uid": [r.scored.rollout.group_id for r, _ in steps],
        "traj_uid": [r.scored.rollout.rollout_id for r, _ in steps],
        **fields,
    }


@pytest.mark.parametrize("gate", ["none", "signed", "success"])
@pytest.mark.parametrize("told", [True, False])
def test_thinking_fields_give_what_the_estimator_gives(gate: Any, told: bool) -> None:
    """With and without `succeeded` and `level_mask`."""
    batch = random_batch(2, price=0.05, level_tokens=LEVEL if told else None)
    rows = field_rows(batch, LENGTH + 3)
    thought, level = (np.zeros_like(rows["response_mask"]) for _ in range(2))
    thought[:, :HEAD], level[:, :LEVEL] = True, True
    masks = {} if gate == "none" else {"thought_mask": thought, "level_mask": level if told else None}
    won = [r.scored.score >= 1.0 for r in batch for _ in r.scored.steps] if told else None
    found, returns = compute_rlvcr_outcome_advantage(
        **rows, step_advantage_w=0.7, gate=gate, succeeded=None if gate == "none" else won, **masks
    )
    settings = {"step_advantage_w": 0.7, "gate": gate, "success_score": 1.0 if told else None}
    wanted = [step for rollout in slow_tokens(batch, **settings) for step in rollout]
    np.testing.assert_allclose(found[:, :LENGTH], wanted, atol=2e-5)
    assert (found[:, LENGTH:] == 0).all()
    np.testing.assert_array_equal(found, returns)
    assert found.dtype == np.float32


def rows_of_four(batch: list[AnnotatedRollout], quantity: str) -> tuple[dict[str, Any], list[int]]:
    """All levels of all steps as rows, the used ones first, and the number of used rows."""
    listed: list[tuple[Any, ...]] = []
    for r in batch:
        for index, s in enumerate(r.thinking.steps if r.thinking else ()):
            name = (r.scored.rollout.rollout_id, index)
            if s.group is None:
                if s.level is not None:
                    listed.append((r, name, s.level, True, np.nan, 0))
                continue
            for score in s.group.scores:
                own = score.level == s.level
                listed.append((r, name, score.level, own, getattr(score, quantity), score.thinking_tokens))
    listed.sort(key=lambda row: not row[3])
    count = len(listed)
    rewards = np.zeros((count, LENGTH), np.float64)
    rewards[:, -1] = [row[0].scored.score for row in listed]
    return {
        "token_level_rewards": rewards,
        "thinking_level_entropies": np.repeat([[row[4]] for row in listed], LENGTH, 1),
        "thinking_token_costs": np.repeat([[float(row[5])] for row in listed], LENGTH, 1),
        "response_mask": np.ones((count, LENGTH), bool),
        "uid": [row[0].scored.rollout.group_id for row in listed],
        "traj_uid": [row[0].scored.rollout.rollout_id for row in listed],
        "step_uid": [row[1] for row in listed],
        "levels": [row[2] for row in listed],
        "sampled": [row[3] for row in listed],
    }, [index for index, row in enumerate(listed) if row[3]]


def named_batch(seed: int, **kwargs: float) -> list[AnnotatedRollout]:
    """A batch in which every step has a level: rows are levels, and a step without one has no row."""
    return [r for r in random_batch(seed, **kwargs) if r.thinking and all(s.level for s in r.thinking.steps)]


@pytest.mark.parametrize(("score", "quantity"), [("logprob", "action_logprob"), ("neg_entropy", "action_entropy")])
@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_rows_of_four_are_compared_as_groups_are(score: Any, quantity: str, mode: Any) -> None:
    batch = named_batch(5, price=0.05)
    rows, own = rows_of_four(batch, quantity)
    found, _ = compute_rlvcr_outcome_advantage(**rows, mode=mode, score=score, price=0.05)
    wanted = [a for c in Rlvcr(mode=mode, score=score)(batch).rollouts for a in c.advantages]
    order = {
        name: i
        for i, name in enumerate((r.scored.rollout.rollout_id, j) for r in batch for j in range(len(r.scored.steps)))
    }
    for row in own:
        np.testing.assert_allclose(found[row], wanted[order[rows["step_uid"][row]]], atol=1e-5)
    assert (np.delete(found, own, 0) == 0).all()


def test_reweighted_rows_all_train() -> None:
    batch = named_batch(7)
    rows, own = rows_of_four(batch, "action_logprob")
    found, _ = compute_rlvcr_outcome_advantage(**rows, combine="reweight", thinking_diversity_w=0.0)
    credited = Rlvcr(combine="reweight", thinking_diversity_w=0.0, importance_cap=1e9)(batch)
    by_step = {(c.rollout.rollout_id, i): a[0] for c in credited.rollouts for i, a in enumerate(c.advantages)}
    for row in own:
        assert found[row, 0] == pytest.approx(by_step[rows["step_uid"][row]], abs=1e-5)
    names = {a.scored.rollout.rollout_id for a in credited.added}
    assert len(names) > 0
    for row in set(range(len(found))) - set(own):
        name, index = rows["step_uid"][row]
        assert (found[row, 0] != 0) == (f"{name}/step-{index}/level-{rows['levels'][row]}" in names)


def test_tensors_come_back_as_tensors_and_no_weight_is_grpo() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    mask = torch.ones(3, 2)
    zeros = torch.zeros(3, 2)
    found, _ = compute_rlvcr_outcome_advantage(rewards, zeros, zeros, mask, ["g"] * 3, ["a", "b", "c"])
    wanted, _ = compute_grpo_outcome_advantage(rewards, mask, ["g"] * 3)
    torch.testing.assert_close(found, wanted)


def test_a_rollout_counts_once_however_many_steps_it_has() -> None:
    rewards = np.array([[1.0], [1.0], [1.0], [0.0]])
    args = (np.zeros((4, 1)), np.zeros((4, 1)), np.ones((4, 1)), ["g"] * 4, ["a", "a", "a", "b"])
    found, _ = compute_rlvcr_outcome_advantage(rewards, *args, norm_by_std=False)
    assert found[:, 0].tolist() == [0.5, 0.5, 0.5, -0.5]
    parts = np.array([[0.0], [0.0], [1.0], [0.0]])
    again, _ = compute_rlvcr_outcome_advantage(parts, *args, norm_by_std=False, row_rewards="step")
    assert again[:, 0].tolist() == found[:, 0].tolist()
    with pytest.raises(CreditError, match="row_rewards"):
        compute_rlvcr_outcome_advantage(parts, *args)


def test_other_trajectory_advantages_take_grpos_place() -> None:
    rewards = np.array([[1.0], [0.0]])
    args = (np.full((2, 1), 0.25), np.zeros((2, 1)), np.ones((2, 1)), ["g", "g"], ["a", "b"])
    found, _ = compute_rlvcr_outcome_advantage(
        rewards, *args, trajectory_advantages=[2.0, -3.0], gate="signed", thought_mask=np.ones((2, 1))
    )
    assert found[:, 0].tolist() == [2.25, -3.25]


def test_a_step_without_a_thinking_advantage_is_left_as_it_was() -> None:
    rewards = np.array([[1.0], [0.0]])
    field = np.array([[np.nan], [0.5]])
    found, _ = compute_rlvcr_outcome_advantage(
        rewards, field, np.zeros((2, 1)), np.ones((2, 1)), ["g", "g"], ["a", "b"], norm_by_std=False
    )
    assert found[:, 0].tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gate": "signed"}, "thought_mask"),
        ({"gate": "success"}, "thought_mask"),
        ({"gate": "success", "thought_mask": np.ones((2, 1)), "succeeded": [True]}, "1 succeeded for 2 rows"),
        ({"combine": "reweight"}, "step_uid"),
        ({"price": 0.1}, "step_uid"),
        ({"step_uid": ["s", "s"]}, "levels"),
        ({"step_uid": ["s", "s"], "levels": [1, 5], "sampled": [True, False]}, "within 1 to 4"),
        ({"step_uid": ["s"], "levels": [1, 2], "sampled": [True, False]}, "1 step_uid for 2 rows"),
        ({"step_uid": ["s", "s"], "levels": [2, 2], "sampled": [True, False]}, "two rows of one level"),
        ({"mode": "max"}, "mode is 'max'"),
        ({"score": "entropy"}, "score is 'entropy'"),
        ({"combine": "reweight", "gate": "signed"}, 'belongs to combine = "additive"'),
        ({"trajectory_advantages": [1.0]}, "for 2 rows; give a finite one for each"),
        ({"trajectory_advantages": [[1.0], [2.0]]}, "for 2 rows; give a finite one for each"),
        ({"trajectory_advantages": [1.0, np.nan]}, "for 2 rows; give a finite one for each"),
    ],
)
def test_what_is_missing_is_told(settings: dict[str, Any], told: str) -> None:
    rewards, zeros = np.array([[1.0], [0.0]]), np.zeros((2, 1))
    with pytest.raises(CreditError, match=told):
        compute_rlvcr_outcome_advantage(rewards, zeros, zeros, np.ones((2, 1)), ["g", "g"], ["a", "b"], **settings)


def test_an_infinite_value_is_no_level() -> None:
    rewards, field = np.array([[1.0], [0.0]]), np.array([[0.0], [-np.inf]])
    with pytest.raises(CreditError, match="row 1 has an infinite value"):
        compute_rlvcr_outcome_advantage(rewards, field, rewards * 0, np.ones((2, 1)), ["g", "g"], ["a", "b"])


def test_a_row_without_tokens_is_not_there() -> None:
    """No level with a log-prob of 0, and no rollout in its group's mean."""
    rewards = np.array([[1.0], [0.0], [0.0], [0.0]])
    mask = np.array([[1], [1], [0], [0]])
    field = np.array([[-1.0], [-1.0], [0.0], [0.0]])
    steps = {"step_uid": ["s", "t", "s", "u"], "levels": [1, 1, 2, 1], "sampled": [True, True, False, True]}
    for more in (steps, {}):
        found, _ = compute_rlvcr_outcome_advantage(
            rewards,
            field * bool(more),
            field * 0,
            mask,
            ["g"] * 4,
            ["a", "b", "a", "c"],
            thinking_diversity_w=0.0,
            norm_by_std=False,
            **(more or {"trajectory_advantages": None}),
        )
        assert found[:, 0].tolist() == ([0.5, -0.5, 0.0, 0.0])


def test_a_row_without_tokens_neither_fails_nor_stands_for_a_level() -> None:
    """The third is empty: it has no effect on whether its group is solved, on duplicate levels or on shares."""
    rewards, mask = np.array([[1.0], [1.0], [0.0]]), np.array([[1], [1], [0]])
    field = np.array([[0.5], [-0.5], [9.0]])
    args = (rewards, field, np.zeros((3, 1)), mask, ["g"] * 3, list("abc"))
    found, _ = compute_rlvcr_outcome_advantage(
        *args, gate="signed", thought_mask=mask, succeeded=[True, True, False], norm_by_std=False
    )
    assert found[:, 0].tolist() == [0.5, -0.5, 0.0]
    rows = {"step_uid": ["s", "s", "s"], "levels": [1, 2, 2], "sampled": [True, False, False]}
    for diversity, wanted in ((0.0, 0.5), (1.0, 0.0)):  # level 1 has the whole share: the other gets a bonus of 1
        found, _ = compute_rlvcr_outcome_advantage(*args, thinking_diversity_w=diversity, **rows)
        assert found[:, 0].tolist() == pytest.approx([wanted, 0.0, 0.0])


def test_where_all_succeed_the_sign_gives_way_by_hand() -> None:
    """1 and 2, both successes of one task: +A_think for both, on the level only. Another task keeps its signs."""
    rewards, field = np.zeros((4, 3)), np.full((4, 3), 0.25)
    rewards[:, 2] = [1.0, 2.0, 0.0, 1.0]
    thought, level = np.tile([1, 1, 0], (4, 1)), np.tile([1, 0, 0], (4, 1))
    found, _ = compute_rlvcr_outcome_advantage(
        *(rewards, field, field * 0, np.ones((4, 3)), ["g", "g", "h", "h"], list("abcd")),
        gate="signed",
        thought_mask=thought,
        level_mask=level,
        succeeded=[True, True, False, True],
        norm_by_std=False,
    )
    assert found.tolist() == [[-0.25, -0.5, -0.5], [0.75, 0.5, 0.5], [-0.75, -0.75, -0.5], [0.75, 0.75, 0.5]]


def test_base_is_grpo_of_the_estimators_own() -> None:
    assert isinstance(Rlvcr().trajectory, Grpo)
