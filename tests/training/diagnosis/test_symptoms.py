"""Why no weight has changed: each cause has its own message and fix."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from diagnosis_cases import DROPPED, UPDATED, config, scored, too_long

from toolwise.training.diagnosis.symptoms import explain_unchanged
from toolwise.types import ScoredRollout, StopReason

GOOD = [scored(1.0), scored(0.0)]


@pytest.mark.parametrize(
    ("rollouts", "metrics", "cause", "cure"),
    [
        ([], DROPPED, "there were no rollouts", "log"),
        ([too_long()], DROPPED, "no prompt fits the context: a prompt of 9 tokens", "max_new_tokens (now 256)"),
        ([scored(1.0, valid=False)], DROPPED, "no rollout got a valid score", "toolwise check reward"),
        (
            [scored(0.0, stop=StopReason.POLICY_FAULT, rewards=(), fault="server down")],
            DROPPED,
            "ended with policy_fault: server down",
            "server",
        ),
        (
            [scored(0.0, stop=StopReason.POLICY_FAULT, rewards=(), fault="rollout.tool_parser: mine.py:parse failed")],
            DROPPED,
            "ended with policy_fault: rollout.tool_parser: mine.py:parse failed",
            "Fix the parser given as rollout.tool_parser",
        ),
        ([scored(1.0), scored(1.0)], DROPPED, "all 8 groups were dropped", "rollout.n"),
        (GOOD, {**UPDATED, "actor/grad_norm": 0.0}, "the gradient is 0", "distinguishes better replies from worse"),
        (GOOD, {**UPDATED, "actor/lr": 0.0}, "the learning rate is 0", "warmup_steps"),
        (
            GOOD,
            {**UPDATED, "actor/update_norm": 0.0, "actor/grad_norm": float("nan"), "actor/skipped_updates": 1.0},
            "every optimizer step was skipped",
            "actor.spike_factor",
        ),
        (GOOD, {**UPDATED, "actor/update_norm": 1e-12}, "1.0e-12 are rounded away in bfloat16", "actor.lr (now 1e-06)"),
    ],
)
def test_each_cause_has_its_cure(
    rollouts: list[ScoredRollout], metrics: Mapping[str, float], cause: str, cure: str
) -> None:
    found = explain_unchanged(config(model={"dtype": "bfloat16"}), rollouts, metrics, "all 8 groups were")
    assert cause in found[0]
    assert cure in found[1]


def with_calls(calls: dict[str, int], failed: dict[str, int]) -> list[ScoredRollout]:
    return [scored(0.0, calls=calls, failed=failed)] * 2


@pytest.mark.parametrize("metrics", [DROPPED, {**UPDATED, "actor/grad_norm": 0.0}])
def test_calls_that_all_failed_are_named_where_they_may_be_why(metrics: Mapping[str, float]) -> None:
    rollouts = with_calls({"search": 2, "calculator": 1}, {"timeout": 2, "tool_error": 1})
    cause, cure = explain_unchanged(config(), rollouts, metrics, "all 8 groups were")
    says = "; 6 of the 6 calls of calculator, search in the latest step failed: timeout (4), tool_error (2)"
    assert cause.endswith(says)
    assert cure.startswith("First read in rollouts/ why the calls fail, and test the tools with `toolwise check tool`.")


@pytest.mark.parametrize(
    ("rollouts", "metrics"),
    [
        (with_calls({"search": 2}, {"timeout": 1}), DROPPED),
        (with_calls({"search": 2}, {}), DROPPED),
        (GOOD, DROPPED),
        (with_calls({"search": 2}, {"timeout": 2}), {**UPDATED, "actor/lr": 0.0}),
    ],
)
def test_calls_are_not_blamed_if_they_went_well_or_something_else_is_the_cause(
    rollouts: list[ScoredRollout], metrics: Mapping[str, float]
) -> None:
    cause, cure = explain_unchanged(config(), rollouts, metrics, "all 8 groups were")
    assert "failed" not in cause
    assert "First read" not in cure


def test_calls_of_tools_that_do_not_exist_are_calls_that_failed() -> None:
    steps = [scored(0.0, calls={"search": 1}, failed={"unknown_tool": 3, "timeout": 1})]
    assert "; 4 of the 4 calls of search" in explain_unchanged(config(), steps, DROPPED, "the group was")[0]


def test_a_tool_whose_calls_all_failed_is_named_though_another_works() -> None:
    rollouts = [*with_calls({"calculator": 2}, {"exception": 2}), *with_calls({"search": 3}, {})]
    cause, cure = explain_unchanged(config(), rollouts, DROPPED, "all 8 groups were")
    assert cause.endswith("; nearly all calls of a tool failed in the latest step: calculator: exception")
    assert cure.startswith("First read in rollouts/")
