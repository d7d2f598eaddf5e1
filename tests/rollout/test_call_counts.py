"""Steps' calls added up."""

from __future__ import annotations

from toolwise.rollout.call_counts import CallCounts


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


def test_nothing_adds_up_to_nothing() -> None:
    usage = CallCounts().usage([], 0.0)
    assert (usage.calls, usage.cost, usage.queue_s, usage.longest_queue_s, usage.sampled_tokens) == (
        {},
        0.0,
        0.0,
        0.0,
        0,
    )
