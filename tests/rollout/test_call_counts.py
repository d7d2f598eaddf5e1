"""Totals of tool calls over the steps of an episode."""

from __future__ import annotations

import math
from typing import Any

import pytest
from thinking_cases import step_data

from toolwise.rollout.call_counts import OTHER_NAMES, CallCounts
from toolwise.types import SampledTokens
from toolwise.untrusted.bounds import MAX_DISTINCT_NAMES


def test_steps_add_up_and_the_time_in_the_queue_leaves_the_step() -> None:
    counts = CallCounts()
    first = {"calls": {"search": 2}, "failed_calls": {"search": 1}, "cost": 0.5, "queue_s": [0.1, 0.3], "kind": "x"}
    counts.add(first)
    counts.add({"calls": {"search": 1, "add": 1}, "cost": 0.25})
    counts.add({})
    assert first == {"calls": {"search": 2}, "failed_calls": {"search": 1}, "cost": 0.5, "kind": "x"}
    usage = counts.usage([], 2.0)
    assert (usage.calls, usage.failed_calls, usage.cost) == ({"search": 3, "add": 1}, {"search": 1}, 0.75)
    assert (usage.queue_s, usage.longest_queue_s, usage.seconds) == (0.4, 0.3, 2.0)


def test_tokens_of_a_server_that_returns_no_ids_are_those_it_counted() -> None:
    told = SampledTokens((), (), (), has_ids=False, extra={"prompt_tokens": 40, "completion_tokens": 3})
    replies = [step_data().model_copy(update={"policy_logprobs": tokens}) for tokens in (told, told, None)]
    usage = CallCounts().usage(replies, 0.0)
    assert (usage.prompt_tokens, usage.sampled_tokens) == (80, 6)


def test_nothing_adds_up_to_nothing() -> None:
    usage = CallCounts().usage([], 0.0)
    assert (usage.calls, usage.cost, usage.queue_s, usage.longest_queue_s, usage.sampled_tokens) == (
        {},
        0.0,
        0.0,
        0.0,
        0,
    )


@pytest.mark.parametrize("cost", [math.nan, math.inf, -0.5, 1e308, "nan", [1]])
def test_a_cost_that_is_none_is_refused(cost: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        CallCounts().add({"cost": cost})


@pytest.mark.parametrize("count", [math.nan, -1, 1.5, "2", None])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        CallCounts().add({"calls": {"search": count}})


@pytest.mark.parametrize("counted", [({"search": -1}, 1.0), ({"search": 1}, math.nan), ({"search": 1}, -1.0), None])
def test_a_count_of_the_text_is_checked_too(counted: Any) -> None:
    counts = CallCounts(lambda steps: counted)
    assert (counts.recount([]) or "").startswith("count_usage: ")
    assert (counts.calls, counts.cost) == ({}, 0.0)


def test_names_are_bounded_in_length_and_number() -> None:
    """A model may call a tool by a different name in every turn, each of any length."""
    counts = CallCounts()
    for number in range(3):
        counts.add({"calls": {f"{number}-{i}" + "x" * 5_000: 1 for i in range(200)}, "failed_calls": {"unknown": 200}})
    calls = counts.usage([], 0.0).calls
    assert sum(calls.values()) == 600
    assert len(calls) <= MAX_DISTINCT_NAMES + 1
    assert calls[OTHER_NAMES] == 600 - MAX_DISTINCT_NAMES
    assert max(map(len, calls)) < 300


def test_the_measured_time_of_calls_adds_up_by_tool_and_leaves_the_step() -> None:
    counts, info = CallCounts(), {"call_s": [("search", 0.5), ("add", 0.25), ("search", 1.0)]}
    counts.add(info)
    counts.add({"call_s": [("add", 0.25)]})
    assert info == {}
    assert counts.usage([], 3.0).tool_s == {"search": 1.5, "add": 0.5}


def test_prices_of_the_run_replace_those_of_the_tools() -> None:
    counts = CallCounts(price=0.5, price_calls=lambda calls: 3.0 * calls["search"])
    counts.add({"calls": {"search": 2, "calculator": 1}, "cost": 7.0})
    assert counts.usage([], 0.0).cost == 6.0
    counted = CallCounts(lambda steps: ({"search": 1}, 0.25), price_calls=lambda calls: 9.0)
    counted.recount([])
    assert counted.usage([], 0.0).cost == 0.25
