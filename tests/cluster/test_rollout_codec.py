"""Tickets and groups survive the way to a worker and back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from async_cases import by_length, tiny_run

from toolwise.cluster.interface import ClusterError, check_payload
from toolwise.cluster.plain_data import from_payload, to_payload
from toolwise.cluster.rollout_codec import (
    group_from_payload,
    group_to_payload,
    ticket_from_payload,
    ticket_to_payload,
)
from toolwise.learner.batch import build_batch, with_zero_advantages
from toolwise.messages import Prefix
from toolwise.routing.prompts import RoutedMessage
from toolwise.training.evaluate import align_results
from toolwise.training.run import Run
from toolwise.types import EvaluateResult, Rollout, RouteDecision, StepOutput


@pytest.fixture(scope="module")
def run() -> Any:
    built = tiny_run(by_length)
    yield built
    built.close()


@pytest.fixture(scope="module")
def group(run: Run) -> tuple[RouteDecision, list[Rollout], list[EvaluateResult]]:
    [decision] = run.router.decide(run.batches.tasks[:1], 3, 0)

    async def go() -> tuple[list[Rollout], list[EvaluateResult]]:
        rollouts = await run.scheduler.roll_out([decision])
        return rollouts, await run.scoring.evaluate(rollouts, step=0)

    rollouts, results = asyncio.run(go())
    return decision, rollouts, results


def test_rollouts_and_rewards_come_back_as_they_were(run: Run, group: Any) -> None:
    decision, rollouts, results = group
    received, scores = group_from_payload(check_payload(group_to_payload(rollouts, results)), decision, 5)
    assert scores == results
    assert [rollout.batch_data_id for rollout in received] == [5, 5, 5]
    for before, after in zip(rollouts, received, strict=True):
        assert replace(after, batch_data_id=0, steps=(), messages=()) == replace(before, steps=(), messages=())
        assert list(after.messages) == list(before.messages)
        for first, second in zip(before.steps, after.steps, strict=True):
            assert first.model_dump() == second.model_dump()
            assert isinstance(second.resulting_messages_history, Prefix)
    batches = [build_batch(with_zero_advantages(align_results(run, part, results))) for part in (rollouts, received)]
    for name in ("rollout_ids", "group_of_rollout"):
        assert getattr(batches[0], name) == getattr(batches[1], name)
    columns = [[(r.rollout_id, r.ids.tolist(), r.sampled.tolist()) for r in batch.rows] for batch in batches]
    assert columns[0] == columns[1]
    assert bool((batches[0].rollout_logprobs == batches[1].rollout_logprobs).all())
    assert bool((batches[0].version == batches[1].version).all())


def test_histories_are_sent_once(group: Any) -> None:
    decision, rollouts, _ = group
    received, _ = group_from_payload(group_to_payload(rollouts, None), decision, 0)
    for rollout in received:
        assert all(step.resulting_messages_history._items is not None for step in rollout.steps)
        assert len({id(step.observation_data._items) for step in rollout.steps}) <= 1


def test_a_group_of_another_ticket_is_noticed(group: Any) -> None:
    decision, rollouts, _ = group
    with pytest.raises(ClusterError, match="asked for the 3 rollouts"):
        group_from_payload(group_to_payload(rollouts[:2], None), decision, 0)


def test_costs_are_by_the_price_list_of_the_decision_which_stays_here(group: Any) -> None:
    decision, rollouts, _ = group
    priced = replace(decision, price=0.5, price_calls=lambda calls: 2.0 + sum(calls.values()))
    ticket_to_payload(priced, do_sample=True)  # the list itself could not be sent
    back, _ = group_from_payload(group_to_payload(rollouts, None), priced, 0)
    assert [r.usage.cost for r in back] == [2.5 + sum(r.usage.calls.values()) for r in rollouts]


def test_a_ticket_keeps_seeds_messages_and_what_a_route_changed(run: Run) -> None:
    [decision] = run.router.decide(run.batches.tasks[:1], 3, 0)
    routed = RoutedMessage.replacing(decision.prompt[-1], "changed")
    decision = replace(
        decision,
        prompt=[*decision.prompt[:-1], routed],
        route="SEARCH",
        logits=(0.5, None),
        tools=("search",),
        log_prob=-0.25,
    )
    received, do_sample, turns = ticket_from_payload(check_payload(ticket_to_payload(decision, do_sample=False)))
    assert not do_sample
    assert turns is None
    assert received.prompt[-1].original == decision.task.prompt[-1]  # type: ignore[attr-defined]
    assert replace(received, prompt=()) == replace(decision, prompt=())
    assert list(received.prompt) == list(decision.prompt)


def test_a_sum_of_steps_stays_one(group: Any) -> None:
    decision, rollouts, _ = group
    results = [EvaluateResult(step_outputs=[StepOutput(step_index=0, base_reward=0.5)]) for _ in rollouts]
    _, received = group_from_payload(group_to_payload(rollouts, results), decision, 0)
    assert received is not None
    assert all(result.is_sum_of_steps and result.score == 0.5 for result in received)


def test_what_an_environment_notes_becomes_text_if_it_cannot_be_sent(group: Any) -> None:
    decision, rollouts, _ = group
    step = rollouts[0].steps[0].model_copy(update={"step_info": {"set": frozenset({1}), "fine": (1, 2)}})
    changed = [replace(rollouts[0], steps=(step,)), *rollouts[1:]]
    received, _ = group_from_payload(group_to_payload(changed, None), decision, 0)
    assert received[0].steps[0].step_info == {"set": "frozenset({1})", "fine": (1, 2)}


def test_objects_do_not_cross() -> None:
    with pytest.raises(ClusterError, match="cannot be sent"):
        to_payload({"f": object()})
    with pytest.raises(ClusterError, match="only bytes, numbers"):
        check_payload({"f": [1, 2]})
    assert from_payload(to_payload({"a": (1, [None, 2.5]), "n": float("inf")})) == {
        "a": (1, [None, 2.5]),
        "n": float("inf"),
    }
