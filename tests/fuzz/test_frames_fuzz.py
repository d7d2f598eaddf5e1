"""What a hostile worker may write: any bytes are frames, or a typed fault; any answer is a result that files take."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from fuzzing import JSON, NUMBERS, TEXT, fuzz
from hypothesis import strategies as st

from toolwise.rewards.align import align_rollouts
from toolwise.rewards.combine import WeightedReward, combine
from toolwise.rewards.executor import episode_reward
from toolwise.rewards.results import read_result, read_results
from toolwise.sandbox.faults import KINDS, WorkerFault, read_fault
from toolwise.sandbox.wire import HEADER, FrameReader, encode, read_answer, to_frame
from toolwise.serialization.json_text import json_text
from toolwise.types import EvaluateResult, Rollout, StopReason, Task, Usage
from toolwise.untrusted.bounds import MAX_METRIC_VALUE, MAX_METRICS, MAX_NAME_CHARS, MAX_SCORE

LENGTHS = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 64))
FRAMES = st.one_of(
    st.binary(max_size=60),
    st.tuples(LENGTHS, st.binary(max_size=60)).map(lambda pair: HEADER.pack(pair[0]) + pair[1]),
    st.binary(max_size=60).map(to_frame),
    st.sampled_from(
        [to_frame(b"[" * 50_000), to_frame(b'{"a":' * 3_000), to_frame(b"9" * 5_000), to_frame(b'{"a": NaN}')]
    ),
)
STEPS = st.fixed_dictionaries(
    {"step_index": st.one_of(st.integers(-1, 3), NUMBERS, TEXT), "base_reward": st.one_of(NUMBERS, JSON)},
    optional={"metrics": JSON, "reason": JSON},
)
METRICS = st.dictionaries(
    TEXT,
    st.one_of(NUMBERS, st.fixed_dictionaries({"score": NUMBERS}, optional={"reason": TEXT, "x": JSON})),
    max_size=4,
)
RESULTS = st.fixed_dictionaries(
    {},
    optional={
        "score": st.one_of(NUMBERS, JSON),
        "is_score_valid": st.one_of(st.booleans(), JSON),
        "reason": st.one_of(TEXT, JSON),
        "metrics": st.one_of(METRICS, JSON),
        "step_outputs": st.one_of(st.lists(STEPS, max_size=4), JSON),
        "error": st.one_of(st.fixed_dictionaries({"kind": TEXT, "message": TEXT}), JSON),
    },
)
MANY = st.sampled_from(
    [
        {"score": 1, "metrics": {str(i): 1.0 for i in range(300)}},
        {"score": 1, "metrics": {"x" * 1_000: 1.0}},
        {"score": 1, "reason": "x" * 30_000},
        {"score": 1, "step_outputs": [{"step_index": i, "base_reward": 0} for i in range(10_001)]},
        {"step_outputs": [{"step_index": i, "base_reward": 1e308} for i in range(3)]},
    ]
)


def keeps_the_rules(result: EvaluateResult, parts: int = 1) -> None:
    """Whatever it is, it can be learned from, or it says why not; and every file takes it."""
    if result.has_valid_score:
        assert result.score is not None
        assert abs(result.score) <= MAX_SCORE
        assert all(abs(m.score) <= MAX_METRIC_VALUE for m in result.metrics.values() if m.is_score_valid)
    assert len(result.metrics) <= parts * (MAX_METRICS + 1)
    assert all(len(name) <= MAX_NAME_CHARS + 60 for name in result.metrics)
    assert len(result.reason or "") < 21_000
    text = json_text(result.model_dump())
    text.encode("utf-8")
    json.loads(text, parse_constant=refuse)


def refuse(word: str) -> None:
    raise AssertionError(word)


def rollout(name: str) -> Rollout:
    return Rollout(name, "g", 0, 0, Task(task_id="t", prompt=[]), None, (), (), StopReason.ANSWERED, Usage())


@fuzz(st.lists(FRAMES, max_size=4), st.integers(1, 9))
def test_any_bytes_are_frames_or_a_fault(parts: list[bytes], at_once: int) -> None:
    incoming, stream = FrameReader(1 << 16), b"".join(parts)
    size = at_once if len(stream) < 1_000 else 4_096
    with suppress(WorkerFault):
        for place in range(0, len(stream), size):
            incoming.feed(stream[place : place + size])
            while (message := incoming.next()) is not None:
                assert isinstance(message, dict)


@fuzz(st.one_of(RESULTS, MANY, JSON))
def test_any_answer_is_a_result(value: Any) -> None:
    try:
        told = json.dumps(value)
    except ValueError:
        return
    result = read_answer({"result": told})
    keeps_the_rules(result)
    keeps_the_rules(read_answer(value))
    keeps_the_rules(read_result(value))
    for one in read_results(value, 2):
        keeps_the_rules(one)


@fuzz(
    st.one_of(JSON, st.fixed_dictionaries({"kind": st.sampled_from(sorted(KINDS)), "message": JSON, "traceback": JSON}))
)
def test_any_fault_is_a_fault(value: Any) -> None:
    fault = read_fault(value)
    assert fault.kind in KINDS
    keeps_the_rules(fault.result())


@fuzz(st.lists(st.one_of(RESULTS, MANY), min_size=2, max_size=4), st.floats(), st.sampled_from(["sum", "normalize"]))
def test_any_results_combine_and_align(values: list[Any], weight: float, how: Any) -> None:
    if not math.isfinite(weight):
        return
    results = [read_result(value) for value in values]
    parts = [
        (WeightedReward(episode_reward("env"), weight, "a"), results),
        (WeightedReward(episode_reward("tools")), results),
    ]
    combined = combine(parts, ["g"] * len(results), how)
    for one in align_rollouts([rollout(str(i)) for i in range(len(combined))], combined):
        keeps_the_rules(one.result, parts=2)


@fuzz(st.one_of(JSON, RESULTS))
def test_what_is_sent_comes_back(value: Any) -> None:
    try:
        sent = {"value": json.loads(json.dumps(value))}
    except ValueError:
        return
    incoming = FrameReader(1 << 20)
    incoming.feed(to_frame(encode(sent)))
    assert repr(incoming.next()) == repr(sent)
    assert not incoming.torn
