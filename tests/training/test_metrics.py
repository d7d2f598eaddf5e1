"""Metrics of rollouts, checked against values computed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from toolwise.messages import Message
from toolwise.training.metrics import mean, reported_metrics, summarize, summarize_validation, validation_metrics
from toolwise.training.records import RolloutRecord
from toolwise.types import (
    EvaluateResult,
    EvaluationFault,
    MetricResult,
    Rollout,
    RouterCredit,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    Usage,
)


def scored(
    score: float | None,
    *,
    kind: str | None = None,
    cost: float = 0.0,
    calls: Mapping[str, int] | None = None,
    failed: Mapping[str, int] | None = None,
    tokens: int = 0,
    steps: int = 1,
    stop: StopReason = StopReason.ANSWERED,
    error: str | None = None,
    **metrics: float,
) -> ScoredRollout:
    step = StepData(
        system_step_index=0, observation_data=None, action_taken={"type": "text"}, resulting_messages_history=[]
    )
    info = {} if kind is None else {"kind": kind}
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], extra_info=info)
    usage = Usage(calls=calls or {}, failed_calls=failed or {}, cost=cost, sampled_tokens=tokens)
    rollout = Rollout("r", "g", 0, 0, task, None, (step,) * steps, task.prompt, stop, usage)
    result = EvaluateResult(
        score=score,
        is_score_valid=error is None,
        metrics={name: MetricResult(score=value) for name, value in metrics.items()},
        error=EvaluationFault(kind=error, message="") if error else None,
    )
    return ScoredRollout(rollout, result, (step,) * steps)


STEP = [
    scored(1.0, cost=2.0, calls={"search": 1, "calculator": 1}, tokens=10, steps=3, correct=1.0),
    scored(0.0, cost=1.0, calls={"search": 1}, failed={"timeout": 1}, tokens=5, steps=2, correct=0.0),
    scored(None, tokens=1, stop=StopReason.MAX_TOKENS, error="exception"),
    scored(0.5, stop=StopReason.MAX_TOKENS, correct=1.0),
]


def test_turns_that_a_stop_string_ended_are_counted() -> None:
    def turn(finish: str) -> StepData:
        tokens = {"token_ids": [1], "logprobs": [0.0], "prompt_ids": [1], "finish_reason": finish}
        return StepData(
            system_step_index=0,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs=tokens,
        )

    one = scored(1.0)
    turns = tuple(map(turn, ("tool_calls", "stop_string", "stop", "stop")))
    assert "outputs/stop_string" not in summarize([one])
    assert summarize([replace(one, rollout=replace(one.rollout, steps=turns))])["outputs/stop_string"] == 0.25


def test_metrics_of_a_step() -> None:
    metrics = summarize(STEP)
    assert metrics == {
        "rollouts": 4.0,
        "outputs/cut": 0.0,
        "outputs/most_common": 1.0,
        "cost/mean": 0.75,
        "calls/mean": 0.75,
        "calls/failed": 0.25,
        "tools/queue_s": 0.0,
        "tools/queue_s_max": 0.0,
        "turns/mean": 1.75,
        "tokens/sampled": 16.0,
        "reward/error_rate": 0.25,
        "reward/invalid_rate": 0.0,
        "reward/misaligned": 0.0,
        "score/mean": 0.5,
        "score/max": 1.0,
        "score/std": pytest.approx((0.5 / 3) ** 0.5),
        "reward/correct/mean": pytest.approx(2 / 3),
        "reward/correct/std": pytest.approx((2 / 9) ** 0.5),
        "stop/answered": 0.5,
        "stop/max_tokens": 0.5,
        "reward/errors/exception": 1.0,
        "tokens/clean": 0.0,
        "tokens/realigned": 0.0,
        "tokens/forked": 0.0,
        "faults/rollouts": 1.0,
        "faults/policy": 0.0,
        "faults/env": 0.0,
        "faults/deadline": 0.0,
        "faults/infrastructure": 0.0,
        "faults/tool": 1.0,
        "faults/parse": 0.0,
        "faults/reward": 1.0,
    }
    assert all(type(value) is float for value in metrics.values())


def test_no_rollouts_no_metrics() -> None:
    assert summarize([]) == {}


def test_where_nothing_could_be_scored_there_is_no_score_rather_than_a_zero() -> None:
    failed = [scored(None, error="bad_type", kind="lookup"), scored(None, error="non_finite", kind="known")]
    metrics = summarize(failed)
    assert "score/mean" not in metrics
    assert metrics["reward/error_rate"] == 1.0
    assert metrics["reward/errors/bad_type"] == metrics["reward/errors/non_finite"] == 1.0
    figures = summarize_validation([*failed, scored(1.0, kind="known", correct=1.0)])
    assert figures["score"] == 1.0
    assert figures["errors"] == 2
    assert "score" not in figures["by_kind"]["lookup"]
    assert figures["by_kind"]["known"]["score"] == 1.0
    assert "eval/lookup/score" not in validation_metrics(figures)


def test_an_invalid_score_does_not_count() -> None:
    invalid = ScoredRollout(STEP[0].rollout, EvaluateResult(score=9.0, is_score_valid=False), ())
    assert summarize([invalid, STEP[1]])["score/mean"] == 0.0
    assert summarize([invalid, STEP[1]])["reward/invalid_rate"] == 0.5
    assert summarize([invalid, STEP[1]])["reward/error_rate"] == 0.0  # reward.max_error_rate does not count it either


def test_a_validation_counts_invalid_scores_apart_from_errors() -> None:
    unsure = scored(0.0, kind="lookup")
    unsure = replace(unsure, result=EvaluateResult(score=0.0, is_score_valid=False))
    figures = summarize_validation([unsure, scored(1.0, kind="lookup"), scored(None, error="exception")])
    assert (figures["n"], figures["score"], figures["errors"], figures["invalid"]) == (3, 1.0, 1, 1)
    assert (figures["by_kind"]["lookup"]["errors"], figures["by_kind"]["lookup"]["invalid"]) == (0, 1)
    assert validation_metrics(figures)["eval/invalid"] == 1.0
    failed = replace(unsure, rollout=replace(unsure.rollout, stop_reason=StopReason.POLICY_FAULT))
    figures = summarize_validation([failed])
    assert (figures["errors"], "invalid" in figures) == (1, False)


def test_validation_metrics_overall_and_by_kind() -> None:
    figures = summarize_validation(
        [
            scored(1.0, kind="lookup", cost=1.0, tokens=10, correct=1.0),
            scored(0.0, kind="lookup", cost=3.0, tokens=20, correct=0.0),
            scored(0.5, kind="known", correct=1.0),
            scored(None, error="exception"),
        ]
    )
    assert figures == {
        "n": 4,
        "score": 0.5,
        "correct": pytest.approx(2 / 3),
        "cost": 1.0,
        "tokens": 7.5,
        "errors": 1,
        "by_kind": {
            "known": {"n": 1, "score": 0.5, "correct": 1.0, "cost": 0.0, "tokens": 0.0, "errors": 0},
            "lookup": {"n": 2, "score": 0.5, "correct": 0.5, "cost": 2.0, "tokens": 15.0, "errors": 0},
        },
    }


def test_validation_metrics_flat() -> None:
    figures = summarize_validation([scored(1.0, kind="lookup", correct=1.0)])
    flat = validation_metrics(figures)
    assert flat["eval/score"] == flat["eval/correct"] == flat["eval/lookup/correct"] == 1.0
    assert flat["eval/n"] == flat["eval/lookup/n"] == 1.0
    assert all(type(value) is float for value in flat.values())
    assert "eval/by_kind" not in flat


def test_a_reward_s_metric_never_takes_the_place_of_a_figure() -> None:
    names = ["n", "score", "cost", "tokens", "errors", "invalid", "prompt_too_long", "by_kind", "loss"]
    names += ["route/ANSWER/share", "budget/cost/limit", "reward/cost"]
    one = scored(1.0, cost=2.0, correct=1.0)
    one.result.metrics.update({name: MetricResult(score=7.0) for name in names})
    figures = summarize_validation([one])
    own = {"n": 1, "score": 1.0, "correct": 1.0, "cost": 2.0, "tokens": 0.0, "errors": 0, "by_kind": {}}
    assert figures == own | {f"reward/{name}": 7.0 for name in names}
    assert validation_metrics(figures)["eval/reward/prompt_too_long"] == 7.0


def test_metrics_are_averaged_over_those_that_have_them_and_are_valid() -> None:
    one = scored(1.0, correct=1.0, style=0.2)
    two = scored(1.0, correct=0.0)
    two.result.metrics["style"] = MetricResult(score=99.0, is_score_valid=False)
    assert reported_metrics([one, two]) == {"correct": [1.0, 0.0], "style": [0.2]}


def test_routes_are_told_apart() -> None:
    def routed(route: str, made: ScoredRollout) -> ScoredRollout:
        return replace(made, rollout=replace(made.rollout, route=route))

    made = [
        routed("ANSWER", scored(0.0)),
        routed("SEARCH-FAMILY", scored(1.0, cost=1.0)),
        routed("SEARCH-FAMILY", scored(0.5, cost=2.0)),
        routed("SEARCH-FAMILY", scored(None, cost=3.0, error="exception")),
    ]
    for figures in (summarize(made), summarize_validation(made)):
        assert (figures["route/ANSWER/share"], figures["route/ANSWER/score"]) == (0.25, 0.0)
        assert (figures["route/SEARCH-FAMILY/share"], figures["route/SEARCH-FAMILY/cost"]) == (0.75, 2.0)
        assert figures["route/SEARCH-FAMILY/score"] == 0.75
    assert not [name for name in summarize([scored(1.0)]) if name.startswith("route/")]


def test_costs_are_those_of_the_router_s_price_list() -> None:
    made = replace(scored(1.0, cost=7.0), router=RouterCredit(True, True, False, cost=0.25))
    made = replace(made, rollout=replace(made.rollout, route="SEARCH-FAMILY"))
    assert (summarize([made])["cost/mean"], summarize_validation([made])["cost"]) == (0.25, 0.25)
    assert summarize([made])["route/SEARCH-FAMILY/cost"] == 0.25
    assert RolloutRecord.of(made).cost == 0.25


def test_the_mean() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert mean([]) == 0.0


def test_a_validation_counts_prompts_that_were_too_long_and_gives_them_no_score() -> None:
    long = scored(None, stop=StopReason.PROMPT_TOO_LONG, steps=0)
    long = replace(long, result=EvaluateResult(is_score_valid=False))
    figures = summarize_validation([scored(1.0), long, long])
    assert (figures["n"], figures["score"], figures["errors"], figures["prompt_too_long"]) == (3, 1.0, 2, 2)
    assert validation_metrics(figures)["eval/prompt_too_long"] == 2.0
    assert "prompt_too_long" not in summarize_validation([scored(1.0)])


def test_tasks_with_held_out_tools_are_a_kind_of_their_own() -> None:
    seen, unseen = scored(1.0), scored(0.0)
    unseen = replace(
        unseen, rollout=replace(unseen.rollout, task=unseen.rollout.task.model_copy(update={"tools": ["new"]}))
    )
    by_kind = summarize_validation([seen, unseen], ["new"])["by_kind"]
    assert {kind: entry["score"] for kind, entry in by_kind.items()} == {"seen tools": 1.0, "unseen tools": 0.0}
