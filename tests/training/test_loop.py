"""One training step: what is trained on, what is dropped and counted, and which metrics are reported."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import make_rows
from toolwise.errors import RewardError
from toolwise.messages import Message
from toolwise.rewards import reward_function
from toolwise.training.loop import collect, score, select_groups, step_result, train_step
from toolwise.training.run import Run, assemble
from toolwise.types import (
    EvaluateResult,
    EvaluationFault,
    Rollout,
    ScoredRollout,
    StepData,
    StepOutput,
    StopReason,
    Task,
    Usage,
)

torch.set_num_threads(1)


def scored(
    group: str,
    value: float | None,
    *,
    stop: StopReason = StopReason.ANSWERED,
    valid: bool = True,
    error: bool = False,
    tokens: bool = True,
) -> ScoredRollout:
    step = StepData(
        system_step_index=0,
        observation_data=None,
        action_taken={"type": "text"},
        resulting_messages_history=[],
        policy_logprobs={"prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0]} if tokens else None,
    )
    task = Task(task_id=group, prompt=[Message(role="user", content="?")])
    rollout = Rollout(f"{group}/{value}", group, 0, 0, task, None, (step,), task.prompt, stop, Usage())
    fault = EvaluationFault(kind="exception", message="down") if error else None
    return ScoredRollout(rollout, EvaluateResult(score=value, is_score_valid=valid, error=fault), (step,))


def tasks(count: int) -> list[Task]:
    return [
        Task(
            task_id=str(place),
            prompt=row["prompt"],
            ground_truth=row["reward_model"]["ground_truth"],
            tools_kwargs=row["extra_info"]["tools_kwargs"],
        )
        for place, row in enumerate(make_rows(count, seed=0, split="train"))
    ]


def tiny_run(function: Callable[..., Any], /, count: int = 6, **sections: dict[str, Any]) -> Run:
    settings: dict[str, Any] = {
        "model": {"device": "cpu"},
        "tools": ["calculator", "search"],
        "data": {"batch_size": 2},
        "rollout": {"n": 2, "max_new_tokens": 12},
        "multi_turn": {"max_turns": 2},
        "actor": {"lr": 1e-3},
        "reward": {"sandbox": {"tier": "off"}},  # a worker could not load rewards defined in these tests
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return assemble(RunConfig.model_validate(settings), tasks=tasks(count), validation_tasks=[], reward=function)


@reward_function
def by_place(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[float]:
    """Never the same within a group of two."""
    return [float(place % 2) for place in range(len(rollouts_messages))]


@reward_function
def all_the_same(messages: Any, ground_truth: Any) -> float:
    return 0.1


# Selection of groups.


def no_score(score: float) -> bool:
    return False


def any_score(score: float) -> bool:
    return True


def test_groups_of_equal_rewards_and_costs_teach_nothing_where_costs_are_compared() -> None:
    group = [scored("a", 1.0), scored("a", 1.0)]
    assert select_groups(group, keeps_equal=any_score, compare_costs=True) == ([], 1.0, 1)
    dear = replace(group[1], rollout=replace(group[1].rollout, usage=Usage(cost=1.0)))
    kept, _, dropped = select_groups([group[0], dear], keeps_equal=any_score, compare_costs=True)
    assert (kept, dropped) == ([group[0], dear], 0)


def test_groups_whose_rewards_differ_are_kept_in_order() -> None:
    given = [scored("a", 1.0), scored("b", 0.0), scored("a", 0.0), scored("b", 2.0)]
    kept, share, dropped = select_groups(given, keeps_equal=no_score)
    assert kept == [given[0], given[2], given[1], given[3]]
    assert (share, dropped) == (0.0, 0)


@pytest.mark.parametrize(
    "left_out",
    [
        scored("a", None, valid=False, error=True),
        scored("a", 5.0, valid=False),
        scored("a", 5.0, error=True),
        scored("a", None),
        scored("a", 5.0, stop=StopReason.POLICY_FAULT),
        scored("a", 5.0, stop=StopReason.ENV_FAULT),
        scored("a", 5.0, stop=StopReason.DEADLINE),
        scored("a", 5.0, tokens=False),
    ],
)
def test_what_does_not_count_is_left_out_of_its_group(left_out: ScoredRollout) -> None:
    good = [scored("a", 1.0), scored("a", 0.0)]
    kept, share, dropped = select_groups([good[0], left_out, good[1]], keeps_equal=no_score)
    assert kept == good
    assert (share, dropped) == (0.0, 0)


@pytest.mark.parametrize(
    "stop", [StopReason.MAX_STEPS, StopReason.MAX_TOKENS, StopReason.REPEATED_INVALID, StopReason.REGEX]
)
def test_endings_that_are_the_policy_s_own_doing_are_learned_from(stop: StopReason) -> None:
    kept, _, _ = select_groups([scored("a", 1.0), scored("a", 0.0, stop=stop)], keeps_equal=no_score)
    assert len(kept) == 2


@pytest.mark.parametrize("keeps_equal", [no_score, any_score])
def test_a_group_with_fewer_than_two_left_is_dropped_and_counted(keeps_equal: Any) -> None:
    given = [
        scored("one", 1.0),
        scored("one", 0.0, stop=StopReason.ENV_FAULT),
        scored("none", 1.0, valid=False),
        scored("none", 0.0, error=True),
        scored("two", 1.0),
        scored("two", 0.0),
    ]
    kept, share, dropped = select_groups(given, keeps_equal=keeps_equal)
    assert [s.rollout.group_id for s in kept] == ["two", "two"]
    assert dropped == 2
    assert share == pytest.approx(2 / 3)  # neither "one" nor "none" has a difference to learn from


def test_groups_with_equal_rewards_are_dropped_or_kept_and_counted() -> None:
    given = [scored("a", 0.1), scored("a", 0.1), scored("a", 0.1), scored("b", 1.0), scored("b", 0.0)]
    kept, share, dropped = select_groups(given, keeps_equal=no_score)
    assert [s.rollout.group_id for s in kept] == ["b", "b"]
    assert (share, dropped) == (0.5, 1)
    kept, share, dropped = select_groups(given, keeps_equal=any_score)
    assert len(kept) == 5
    assert (share, dropped) == (0.5, 0)
    kept, _, dropped = select_groups(
        [*given, scored("c", 0.9), scored("c", 0.9)], keeps_equal=lambda score: score > 0.5
    )
    assert [s.rollout.group_id for s in kept] == ["b", "b", "c", "c"]
    assert dropped == 1


def test_an_invalid_score_does_not_hide_that_the_others_are_equal() -> None:
    _, share, dropped = select_groups(
        [scored("a", 1.0), scored("a", 1.0), scored("a", 7.0, valid=False)], keeps_equal=no_score
    )
    assert (share, dropped) == (1.0, 1)


def test_selecting_from_nothing() -> None:
    assert select_groups([], keeps_equal=no_score) == ([], 0.0, 0)


# Scoring.


def failing(bad: int) -> Callable[..., Any]:
    calls = iter(range(1000))

    def sometimes(messages: Any, ground_truth: Any) -> float:
        if next(calls) < bad:
            raise ValueError("the judge\nis down")
        return 1.0

    return sometimes


def roll_out(run: Run) -> list[Rollout]:
    decisions = run.router.decide(next(run.batches), run.config.rollout.n, 0)
    return asyncio.run(run.scheduler.roll_out(decisions))


def test_failures_up_to_the_set_rate_are_typed_and_left_out() -> None:
    run = tiny_run(failing(1), reward={"max_error_rate": 0.25})
    found = asyncio.run(score(run, roll_out(run)))
    assert [s.result.has_valid_score for s in found] == [False, True, True, True]
    assert found[0].result.error is not None
    assert found[0].result.score is None


def test_failures_above_the_set_rate_stop_the_run_with_function_and_rollout_named() -> None:
    run = tiny_run(failing(2), reward={"max_error_rate": 0.25})
    rollouts = roll_out(run)
    with pytest.raises(RewardError) as caught:
        asyncio.run(score(run, rollouts))
    said = str(caught.value)
    assert "sometimes failed on 2 of 4 rollouts" in said
    assert rollouts[0].rollout_id in said
    assert "exception: ValueError: the judge is down" in said
    assert "\n" not in said


def test_a_nan_step_reward_is_reported_and_the_run_continues() -> None:
    @reward_function
    def odd(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[EvaluateResult]:
        steps = [StepOutput(step_index=0, base_reward=float("nan"))]
        return [EvaluateResult(score=float(p % 2), step_outputs=steps) for p in range(len(rollouts_messages))]

    turn = asyncio.run(train_step(tiny_run(odd)))
    assert len(turn.credited) == 4
    assert (turn.metrics["reward/misaligned"], turn.metrics["reward/error_rate"]) == (4.0, 0.0)
    assert all("non_finite step_index 0: its base_reward is nan" in s.warnings[0] for s in turn.scored)
    assert all(s.steps[0].base_reward is None for s in turn.scored)


def test_results_that_are_not_valid_do_not_stop_the_run_and_are_no_errors() -> None:
    def unsure(messages: Any, ground_truth: Any) -> EvaluateResult:
        return EvaluateResult(is_score_valid=False)

    turn = asyncio.run(train_step(tiny_run(unsure, reward={"max_error_rate": 0.0})))
    assert (turn.metrics["reward/invalid_rate"], turn.metrics["reward/error_rate"]) == (1.0, 0.0)


def test_a_rate_of_one_never_stops_the_run() -> None:
    run = tiny_run(failing(99), reward={"max_error_rate": 1.0})
    turn = asyncio.run(train_step(run))
    assert turn.credited == []
    assert turn.metrics["reward/error_rate"] == 1.0
    assert turn.metrics["reward/errors/exception"] == 4.0
    assert turn.metrics["groups/dropped"] == 2.0
    assert "score/mean" not in turn.metrics  # no silent zero
    assert turn.metrics["actor/updates"] == 0.0


def test_the_reward_receives_the_step() -> None:
    seen: list[int] = []

    def watch(messages: Any, ground_truth: Any, step: int) -> float:
        seen.append(step)
        return float(len(seen) % 2)

    run = tiny_run(watch)
    asyncio.run(train_step(run))
    asyncio.run(train_step(run))
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1]


# Collecting.


@pytest.mark.parametrize(("mode", "batches", "learned"), [("drop", 1, 0), ("keep", 1, 4), ("refill", 3, 0)])
def test_groups_of_equals_are_dropped_kept_or_refilled(mode: str, batches: int, learned: int) -> None:
    run = tiny_run(all_the_same, algorithm={"zero_std_groups": mode, "max_refills": 2})
    found, usable, counts = asyncio.run(collect(run))
    assert len(found) == 4 * batches
    assert len(usable) == learned
    assert counts["frac_zero_std"] == 1.0
    assert counts["groups/batches"] == batches
    assert counts["groups/dropped"] == (0 if mode == "keep" else 2 * batches)


def test_refilling_rolls_out_further_tasks_until_there_are_enough() -> None:
    calls = iter(range(1000))

    @reward_function
    def second_time(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[float]:
        differ = next(calls) > 0
        return [float(differ and place % 2) for place in range(len(rollouts_messages))]

    run = tiny_run(second_time, algorithm={"zero_std_groups": "refill", "max_refills": 3})
    found, usable, counts = asyncio.run(collect(run))
    assert counts["groups/batches"] == 2.0
    assert counts["groups/dropped"] == 2.0
    assert counts["frac_zero_std"] == 0.5
    first, second = ({s.rollout.task.task_id for s in part} for part in (found[:4], found[4:]))
    assert len(first) == len(second) == 2
    assert not first & second
    assert usable == found[4:]
    assert len({s.rollout.rollout_id for s in found}) == 8


def test_a_task_that_comes_up_again_in_a_refill_is_rolled_out_afresh() -> None:
    run = tiny_run(
        all_the_same,
        count=2,
        data={"shuffle": False},
        rollout={"temperature": 3.0},
        algorithm={"zero_std_groups": "refill", "max_refills": 1},
    )
    found, _, _ = asyncio.run(collect(run))
    said = [[m.content for m in s.rollout.messages] for s in found]
    assert [s.rollout.task.task_id for s in found] == ["0", "0", "1", "1"] * 2
    assert said[:4] != said[4:]


def test_without_need_nothing_is_refilled() -> None:
    run = tiny_run(by_place, algorithm={"zero_std_groups": "refill"})
    _, usable, counts = asyncio.run(collect(run))
    assert counts["groups/batches"] == 1.0
    assert len(usable) == 4


# The whole step.

DOCUMENTED = {
    "actor/clip_frac",
    "actor/computed_tokens",
    "actor/entropy",
    "actor/grad_norm",
    "actor/kl",
    "actor/loss",
    "actor/lr",
    "actor/skipped_spikes",
    "actor/skipped_updates",
    "actor/update_norm",
    "actor/updates",
    "calls/failed",
    "calls/mean",
    "canary/logprob_gap_max",
    "canary/logprob_gap_mean",
    "cost/mean",
    "faults/deadline",
    "faults/env",
    "faults/infrastructure",
    "faults/parse",
    "faults/policy",
    "faults/reward",
    "faults/rollouts",
    "faults/tool",
    "frac_zero_std",
    "groups/batches",
    "groups/dropped",
    "reward/error_rate",
    "reward/invalid_rate",
    "reward/misaligned",
    "tokens/clean",
    "tokens/forked",
    "tokens/realigned",
    "tools/abandoned",
    "tools/queue_s",
    "tools/queue_s_max",
    "tools/workers_killed",
    "rollouts",
    "score/mean",
    "score/std",
    "score/max",
    "outputs/cut",
    "outputs/most_common",
    "time/blocked_s",
    "time/blocks",
    "time/rollout_s",
    "time/router_s",
    "time/step_s",
    "time/tokens_per_s",
    "time/update_s",
    "tokens/sampled",
    "turns/mean",
}


def test_a_step_changes_the_weights_and_reports_every_figure() -> None:
    # A temperature at which the rollouts of a group differ: equal ones with opposite advantages have a gradient of 0.
    run = tiny_run(by_place, rollout={"temperature": 3.0})
    before = [p.detach().clone() for p in run.learner.model.parameters()]
    turn = asyncio.run(train_step(run))
    after = list(run.learner.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert run.policy.model is run.learner.model
    assert set(turn.metrics) >= DOCUMENTED
    assert {name.split("/")[0] for name in set(turn.metrics) - DOCUMENTED} == {"stop", "engine"}
    assert all(math.isfinite(value) for value in turn.metrics.values())
    assert turn.metrics["rollouts"] == 4
    assert turn.metrics["score/mean"] == 0.5
    assert turn.metrics["actor/updates"] == 1
    assert turn.metrics["canary/logprob_gap_max"] < 1e-3
    assert turn.metrics["engine/prefilled_tokens"] > 0
    assert (run.progress.step, run.learner.version, run.policy.version) == (1, 1, 1)
    assert len(turn.scored) == len(turn.credited) == 4


def test_the_next_step_draws_from_the_new_weights_and_says_so() -> None:
    run = tiny_run(by_place)
    versions = []
    for _ in range(2):
        turn = asyncio.run(train_step(run))
        logprobs = [step.policy_logprobs for s in turn.scored for step in s.steps]
        versions.append({found["policy_version"] for found in logprobs if found})
        assert turn.metrics["canary/logprob_gap_max"] < 1e-3
    assert versions == [{0}, {1}]


def test_a_step_with_nothing_to_learn_from_leaves_the_weights() -> None:
    run = tiny_run(all_the_same)
    before = [p.detach().clone() for p in run.learner.model.parameters()]
    turn = asyncio.run(train_step(run))
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.model.parameters(), strict=True))
    assert turn.credited == []
    assert turn.metrics["actor/updates"] == 0.0
    assert run.progress.step == 1


def test_what_is_scored_is_not_what_is_credited() -> None:
    """Advantages stand in the credited steps; the scored ones stay as scoring left them."""
    turn = asyncio.run(train_step(tiny_run(by_place)))
    assert all(step.advantage is None for s in turn.scored for step in s.steps)
    assert all(step.advantage is not None for c in turn.credited for step in c.steps)


@pytest.mark.parametrize(("own", "speed"), [({}, 50.0), ({"async/learner_wait": 0.9}, 25.0)])
def test_tokens_per_second_are_of_the_whole_step_where_rollouts_overlap_the_update(
    own: dict[str, float], speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolwise.training.loop.summarize", lambda scored: {"tokens/sampled": 100.0})
    times = {"time/rollout_s": 2.0, "time/step_s": 4.0}
    assert step_result([], [], times | own, {}, {}).metrics["time/tokens_per_s"] == speed
