"""Rows for unused levels: forced tokens are never trained, sampled ones once, off-policy ones are weighted."""

from __future__ import annotations

import numpy as np
import pytest
from rlvcr_cases import level_score, thinking_step, thoughtful

from toolwise.advantages import Grpo, Rlvcr
from toolwise.advantages.level_values import alternative_rows
from toolwise.learner.batch import build_batch
from toolwise.learner.rows import build_rows
from toolwise.types import AnnotatedRollout, CreditedRollout, ThinkingGroup, ThinkingStep

FOUR = {1: -3.0, 2: -2.0, 3: -1.0, 4: -2.5}
TOKENS = {1: 0, 2: 2, 3: 3, 4: 4}


def credited() -> CreditedRollout:
    step = thinking_step(3, FOUR, tokens=TOKENS)
    both = [thoughtful(1.0, [step], name="won"), thoughtful(0.0, [step], name="lost")]
    [won, _] = Grpo(norm_by_std=False)(both).rollouts
    return won


def rows(cap: float = 2.0, step: ThinkingStep | None = None) -> list[CreditedRollout]:
    step = step or thinking_step(3, FOUR, tokens=TOKENS)
    added = alternative_rows(credited(), 0, step, np.array([0.1, 0.2, 0.3, 0.4]), cap=cap)
    return [CreditedRollout(AnnotatedRollout(a.scored), a.scored.steps, a.advantages) for a in added]


def test_one_row_for_each_level_that_was_not_used() -> None:
    assert [r.rollout.rollout_id for r in rows()] == [f"won/step-0/level-{k}" for k in (1, 2, 4)]
    assert {r.rollout.group_id for r in rows()} == {"g"}


def test_a_row_is_history_level_thought_tag_and_action_and_only_what_was_drawn_is_learned() -> None:
    level_1, level_2, _ = (build_rows([r])[0] for r in rows())
    # history 1 2, forced level 102, thought 202 202, the action's tag 9, the action 7 8
    assert level_2.ids.tolist() == [1, 2, 102, 202, 202, 9, 7, 8]
    assert level_2.sampled.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert level_1.ids.tolist() == [1, 2, 101, 9, 7, 8]
    assert level_1.sampled.tolist() == [False] * 4 + [True] * 2


def test_tokens_carry_the_log_probs_of_their_own_context() -> None:
    batch = build_batch([rows()[1]])
    [row], logprobs = batch.rows, batch.rollout_logprobs
    assert np.flatnonzero(row.sampled).tolist() == [3, 4, 6, 7]
    assert logprobs[:2].tolist() == [-0.5, -0.5]  # as the thought was sampled
    assert logprobs[2:].tolist() == [-1.75, -2.25]  # as the action was scored after that thought


def test_an_action_is_weighed_by_how_much_likelier_it_is_here_than_where_it_was_drawn() -> None:
    found = rows()
    np.testing.assert_allclose(found[1].advantages[0], 0.2)
    np.testing.assert_allclose(found[1].advantages[1], 0.2 * np.exp(-1.0), rtol=1e-6)
    np.testing.assert_allclose(found[0].advantages[0], 0.1 * np.exp(-2.0), rtol=1e-6)


@pytest.mark.parametrize(("cap", "wanted"), [(2.0, 2.0), (1.2, 1.2), (1e9, np.exp(3.0))])
def test_the_weight_is_bounded(cap: float, wanted: float) -> None:
    scores = (level_score(1, -4.0, used=True), level_score(2, -1.0, used=False, tokens=1))
    step = ThinkingStep(1, 0, 1, ThinkingGroup(1, scores, [7, 8]))
    [row] = rows(cap, step)
    np.testing.assert_allclose(row.advantages[-1], 0.2 * wanted, rtol=1e-5)


def test_only_complete_groups_of_winners_are_added() -> None:
    whole, torn = thinking_step(3, FOUR), thinking_step(3, {3: -1.0, 4: -2.0})
    batch = [thoughtful(1.0, [whole, torn], name="won"), thoughtful(0.0, [whole], name="lost")]
    result = Rlvcr(combine="reweight", thinking_diversity_w=0.0)(batch)
    found = result.rollouts
    assert [c.rollout.rollout_id for c in found] == ["won", "lost"]
    assert [a.scored.rollout.rollout_id for a in result.added] == [f"won/step-0/level-{k}" for k in (1, 2, 4)]
    assert result.metrics["thinking/rows_added"] == 3
    base = Grpo()(batch).rollouts
    assert found[1].advantages[0].tolist() == base[1].advantages[0].tolist()
    assert found[0].advantages[1].tolist() == base[0].advantages[1].tolist()


def test_equal_scores_add_nothing() -> None:
    step = thinking_step(3, FOUR)
    batch = [thoughtful(1.0, [step], name=n) for n in ("a", "b")]
    assert len(Rlvcr(combine="reweight")(batch).added) == 0


def test_a_score_that_counts_as_success_can_be_set() -> None:
    step = thinking_step(3, FOUR)
    batch = [thoughtful(0.4, [step], name="a"), thoughtful(0.0, [step], name="b")]
    assert len(Rlvcr(combine="reweight")(batch).added) == 3
    assert len(Rlvcr(combine="reweight", success_score=0.5)(batch).added) == 0
