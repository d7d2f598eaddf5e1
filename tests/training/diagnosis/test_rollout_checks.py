"""Each check of what the agent does on hand-made metrics, ill and healthy."""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.diagnosis.test_learning_checks import falling, found, history

from toolwise.training.diagnosis import rollout_checks as checks


def test_rollouts_that_grow_without_better_answers_creep() -> None:
    run = history(tokens__sampled=falling(320.0, 1600.0), reward__correct__mean=falling(0.5, 0.45))
    finding = found(checks.length_creep(run), "length_creep")
    assert "while the share of correct answers" in finding.says
    found(checks.length_creep(history(tokens__sampled=falling(320.0, 1920.0))), "length_creep")  # no `correct`
    into_limit = history(tokens__sampled=falling(320.0, 800.0), outputs__cut=lambda step: 0.5 * (step > 10))
    found(checks.length_creep(into_limit), "length_creep")
    paid = history(
        tokens__sampled=falling(320.0, 1600.0),
        score__mean=falling(0.3, 0.8),
        outputs__cut=lambda step: 0.5 * (step > 10),
    )
    found(checks.length_creep(paid), "length_creep")  # the score rises with the length, up to the limit


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens__sampled": falling(320.0, 1600.0), "reward__correct__mean": falling(0.3, 0.8)},  # worth it
        {"tokens__sampled": falling(320.0, 1920.0), "score__mean": falling(0.3, 0.8)},  # the same, without `correct`
        {"tokens__sampled": falling(320.0, 480.0), "reward__correct__mean": 0.4},  # hardly longer
        {"tokens__sampled": falling(320.0, 700.0), "outputs__cut": 0.3},  # cut off from the beginning
        {"tokens__sampled": falling(320.0, 700.0)},  # twice as long, and no one knows whether it is worth it
    ],
)
def test_longer_rollouts_that_answer_better_do_not(columns: dict[str, Any]) -> None:
    assert checks.length_creep(history(**columns)) is None


def test_one_reply_for_all_tasks_is_found() -> None:
    run = history(outputs__most_common=falling(0.1, 0.9), score__mean=0.4, settings={"data": {"batch_size": 8}})
    assert "word for word" in found(checks.identical_outputs(run), "identical_outputs").says


@pytest.mark.parametrize(
    "columns",
    [
        {"outputs__most_common": falling(0.1, 0.25)},  # every task has a reply of its own
        {"outputs__most_common": 0.7},  # from the beginning: there are few possible answers
        {"outputs__most_common": falling(0.1, 0.9), "reward__correct__mean": 0.95},  # it is the right one
        {"outputs__most_common": falling(0.1, 0.9), "settings": {"data": {"batch_size": 2}}},  # too few tasks
        {},
    ],
)
def test_replies_that_may_be_equal_are_not(columns: dict[str, Any]) -> None:
    assert checks.identical_outputs(history(**{"score__mean": 0.4, **columns})) is None


def test_replies_that_are_cut_off_are_found() -> None:
    run = history(steps=5, outputs__cut=0.4, settings={"rollout": {"max_new_tokens": 16}})
    assert "rollout.max_new_tokens (now 16)" in found(checks.truncation(run), "truncation").cure


@pytest.mark.parametrize("columns", [{"outputs__cut": 0.05}, {"steps": 3, "outputs__cut": 0.9}, {}])
def test_a_few_of_them_are_not(columns: dict[str, Any]) -> None:
    assert checks.truncation(history(**columns)) is None


def test_a_tool_that_often_fails_is_named() -> None:
    run = history(steps=3, calls__mean=1.0, faults__tool=15.0, faults__tool__calculator=0.47)
    finding = found(checks.tool_failures(run), "tool_failures")
    assert "calculator (47%)" in finding.says
    assert finding.figures["calls"] == 96


@pytest.mark.parametrize(
    "columns", [{"calls__mean": 1.0, "faults__tool": 2.0}, {"calls__mean": 0.05, "faults__tool": 1.0}, {}]
)
def test_a_tool_that_rarely_fails_is_not(columns: dict[str, Any]) -> None:
    assert checks.tool_failures(history(**columns)) is None


BUDGET = {"router__cost__budget": 0.5, "router__cost__lambda": 2.0}


def test_a_budget_that_is_not_held_is_found_with_its_cap() -> None:
    run = history(steps=30, router__cost__mean=0.9, router__cost__lambda_at_cap=1.0, **BUDGET)
    finding = found(checks.budget_missed(run), "budget_missed")
    assert "λ is at its cap" in finding.says
    assert finding.cure.startswith("raise the cap")


@pytest.mark.parametrize(
    "columns",
    [
        {"router__cost__mean": 0.55},  # held, nearly
        {"router__cost__mean": falling(1.0, 0.5)},  # λ did its work
        {"router__cost__mean": 0.9, "steps": 15},  # too early
        {"router__cost__mean": 0.2},  # less than allowed
        {
            "router__cost__mean": 0.9,
            "validations": [{"step": 20, "eval/budget/cost/delivered": 0.5}],
        },  # the routes that are evaluated hold it
    ],
)
def test_a_budget_that_is_held_is_not(columns: dict[str, Any]) -> None:
    assert checks.budget_missed(history(**{"steps": 30, **BUDGET, **columns})) is None


def test_a_run_without_a_router_has_no_budget_to_miss() -> None:
    assert checks.budget_missed(history(steps=30, cost__mean=5.0)) is None


def test_the_one_that_waits_starves() -> None:
    run = history(steps=5, async__learner_wait=0.7, async__engine_wait=0.1)
    finding = checks.starvation(run)
    assert finding is not None
    assert "The learner waited for rollouts in 70%" in finding.says


@pytest.mark.parametrize("columns", [{"async__learner_wait": 0.3, "async__engine_wait": 0.4}, {}])
def test_those_that_work_do_not(columns: dict[str, Any]) -> None:
    assert checks.starvation(history(**columns)) is None
