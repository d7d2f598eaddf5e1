"""Gold and empty answers: how they are built, and which must score best."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sample_rollouts import sample_rows

from toolwise.checks.reward.gold import GoldTrial, check_empty, check_gold, run_gold_trials
from toolwise.checks.reward.stored_rollouts import StoredRollout, score_rollouts
from toolwise.config.schema import RewardConfig, SandboxConfig
from toolwise.errors import DataError
from toolwise.rewards.results import fault_result
from toolwise.training.evaluate import build_scoring
from toolwise.types import EvaluateResult

MakeStored = Callable[..., list[StoredRollout]]
MakeReward = Callable[[str], str]

LENGTH = "def judge(messages, ground_truth):\n    return float(len(messages[-1].content or ''))"


def trials_of(reference: str, stored: list[StoredRollout], form: str | None = None) -> list[GoldTrial]:
    scoring = build_scoring(RewardConfig(function=reference, sandbox=SandboxConfig(workers=1)))

    async def go() -> list[GoldTrial]:
        return await run_gold_trials(scoring, stored, await score_rollouts(scoring, stored), form)

    try:
        return asyncio.run(go())
    finally:
        scoring.close()


def rows(**changes: Any) -> list[dict[str, Any]]:
    """One task of the sample, with other columns."""
    return [{**row, **changes} for row in sample_rows()[:4]]


def bare_rows(**changes: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "gold"} for row in rows(**changes)]


def test_a_text_is_the_last_message_after_the_prompt(make_stored: MakeStored, make_reward: MakeReward) -> None:
    (trial,) = trials_of(make_reward(LENGTH), make_stored(rows(gold="x" * 50)))
    assert (trial.form, trial.gold and trial.gold.score, trial.empty and trial.empty.score) == ("gold", 50.0, 0.0)
    assert trial.gold_is_best
    assert not trial.empty_is_best


def test_messages_follow_the_prompt_or_are_the_whole(make_stored: MakeStored, make_reward: MakeReward) -> None:
    reference = make_reward("def judge(messages, ground_truth):\n    return float(len(messages))")
    reply, prompt = {"role": "assistant", "content": "425"}, {"role": "user", "content": "another?"}
    for gold, length in (([reply], 2.0), ([reply, prompt, reply], 4.0), ([prompt, reply, reply], 3.0)):
        (trial,) = trials_of(reference, make_stored(rows(gold=gold)))
        assert trial.gold is not None
        assert trial.gold.score == length


def test_a_gold_that_is_none_is_refused(make_stored: MakeStored, make_reward: MakeReward) -> None:
    with pytest.raises(DataError, match="task task-0, field gold: not a text or messages"):
        trials_of(make_reward(LENGTH), make_stored(rows(gold=17)))


def test_one_row_may_say_it_for_its_whole_task(make_stored: MakeStored, make_reward: MakeReward) -> None:
    some = bare_rows()
    some[2]["gold"] = "x" * 50
    (trial,) = trials_of(make_reward(LENGTH), make_stored(some))
    assert trial.form == "gold"


def test_forms_of_a_ground_truth_are_tried_in_turn(make_stored: MakeStored, make_reward: MakeReward) -> None:
    reference = make_reward(
        "def judge(messages, ground_truth):\n"
        "    return float((messages[-1].content or '') == '<answer>' + ground_truth + '</answer>')"
    )
    (trial,) = trials_of(reference, make_stored(bare_rows()))
    assert trial.form == "<answer>{}</answer>"
    assert trial.passed


def test_a_form_can_be_given(make_stored: MakeStored, make_reward: MakeReward) -> None:
    reference = make_reward(
        "def judge(messages, ground_truth):\n    return float(messages[-1].content == f'So: {ground_truth}!')"
    )
    (trial,) = trials_of(reference, make_stored(bare_rows()), "So: {}!")
    assert (trial.form, trial.passed) == ("So: {}!", True)


def test_a_ground_truth_that_is_no_text_gives_no_gold(make_stored: MakeStored, make_reward: MakeReward) -> None:
    (trial,) = trials_of(make_reward(LENGTH), make_stored(bare_rows(ground_truth={"answer": 4})))
    assert (trial.form, trial.gold) == (None, None)
    assert check_gold([trial]).verdict == "warning"
    assert check_empty([trial]).verdict == "ok"


def test_rewards_that_compare_see_gold_among_the_stored(make_stored: MakeStored, make_reward: MakeReward) -> None:
    """The function returns how many there were: four stored, a gold and an empty one."""
    reference = make_reward(
        "def judge(group_messages, ground_truth):\n    return [float(len(group_messages))] * len(group_messages)"
    )
    trials = trials_of(reference, make_stored())
    assert [trial.gold and trial.gold.score for trial in trials] == [6.0] * 3
    assert all(len(trial.scores) == 4 for trial in trials)


def trial(
    stored: StoredRollout, gold: float | None, empty: float | None, *scores: float, form: str | None = "gold"
) -> GoldTrial:
    return GoldTrial(
        stored=stored,
        form=form,
        gold=None if gold is None else EvaluateResult(score=gold),
        empty=fault_result("exception", "boom") if empty is None else EvaluateResult(score=empty),
        scores=tuple((f"r{number}", score) for number, score in enumerate(scores)),
    )


def test_who_beats_the_gold_is_named(make_stored: MakeStored) -> None:
    one = make_stored()[0]
    found = check_gold([trial(one, 0.5, 0.0, 0.4, 1.0)])
    assert found.verdict == "wrong"
    assert found.details == ("task task-0: the gold answer scores 0.5, r1 scores 1",)


def test_a_draw_is_enough_for_gold_and_too_much_for_empty(make_stored: MakeStored) -> None:
    one = make_stored()[0]
    assert check_gold([trial(one, 1.0, 0.0, 1.0)]).verdict == "ok"
    assert check_empty([trial(one, 1.0, 1.0, 1.0)]).verdict == "wrong"


def test_a_gold_without_a_score_is_wrong(make_stored: MakeStored) -> None:
    found = check_gold([trial(make_stored()[0], None, 0.0, 1.0)])
    assert found.verdict == "wrong"
    assert "gets no score" in found.details[0]


def test_without_gold_an_empty_answer_is_measured_by_the_stored(make_stored: MakeStored) -> None:
    one = make_stored()[0]
    assert check_empty([trial(one, None, 1.0, 0.0, 1.0, form=None)]).verdict == "wrong"
    assert check_empty([trial(one, None, 0.0, 0.0, 1.0, form=None)]).verdict == "ok"
    assert check_empty([trial(one, None, 0.0, 0.0, 0.0, form=None)]).verdict == "ok"  # all of them wrong alike


def test_failing_on_an_empty_answer_is_wrong(make_stored: MakeStored) -> None:
    found = check_empty([trial(make_stored()[0], 1.0, None, 0.0)])
    assert (found.verdict, found.details) == ("wrong", ("task task-0: exception: boom",))
