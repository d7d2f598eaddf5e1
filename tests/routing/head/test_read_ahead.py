"""Prompts that are read ahead give the same bits, and nothing that is out of date."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_cases import tiny
from torch import Tensor

from toolwise.routing.head import predictor as predictors
from toolwise.routing.head import read_ahead
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.predictor import HeadPredictor, feature_width
from toolwise.routing.head.read_ahead import ReadAhead, has_free_core

PROMPTS = [[7, 60, 3, 20], [7, 60, 3, 21, 22], [9, 4]]
FEATURES = torch.arange(6.0).view(3, 2)


def test_they_are_taken_once_and_only_for_the_prompts_that_were_planned() -> None:
    ahead = ReadAhead()
    ahead.start()  # nothing was planned
    assert ahead.take(PROMPTS) is None
    for asked, expected in ((PROMPTS, FEATURES), (PROMPTS[:2], None), (PROMPTS[::-1], None)):
        ahead.plan(PROMPTS, lambda: FEATURES)
        ahead.start()
        assert ahead.take(asked) is expected
        assert ahead.take(PROMPTS) is None
    ahead.plan(PROMPTS, lambda: FEATURES)
    assert ahead.take(PROMPTS) is None  # not started


def test_taking_waits_and_a_failure_is_left_to_whoever_reads_again() -> None:
    ahead, go, done = ReadAhead(), threading.Event(), []

    def read() -> Tensor:
        assert go.wait(20)
        done.append(threading.current_thread())
        raise MemoryError("no room")

    ahead.plan(PROMPTS, read)
    ahead.start()
    threading.Timer(0.02, go.set).start()
    assert ahead.take(PROMPTS[:1]) is None
    assert done not in ([], [threading.main_thread()])  # weights may change now: nothing reads them any more


def made(*, pool: str = "last") -> HeadPredictor:
    model = tiny("builtin")
    settings = HeadSettings(width=feature_width(model), routes=("A", "B", "C"), pool=pool)  # type: ignore[arg-type]
    head = RouterHead(settings)
    torch.manual_seed(0)
    with torch.no_grad():
        head.out.weight.normal_()
    return HeadPredictor(model, head)


def test_predictions_are_the_same_bits_with_the_weights_of_when_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictors, "has_free_core", lambda: True)
    ahead, plain = made(), made()
    ahead.plan_ahead(PROMPTS)
    with torch.no_grad():
        for each in (ahead, plain):
            each.model.get_decoder().layers[0].mlp.down_proj.weight.mul_(1.5)
    ahead.read_ahead()
    validated = ahead.predict(PROMPTS, averaged=True)  # neither waits nor takes it away
    assert ahead._ahead._reading is not None
    predicted, expected = ahead.predict(PROMPTS), plain.predict(PROMPTS)
    assert ahead._ahead._reading is None
    for one, other, averaged in zip(predicted, expected, validated, strict=True):
        assert one.logprobs == other.logprobs == averaged.logprobs
        assert torch.equal(one.head_inputs[1], other.head_inputs[1])


def test_nothing_is_planned_where_no_core_is_free_or_the_learner_s_pass_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free, pool in ((False, "last"), (True, "mean")):
        monkeypatch.setattr(predictors, "has_free_core", lambda free=free: free)
        predictor = made(pool=pool)
        for prompts in ([], PROMPTS):
            predictor.plan_ahead(prompts)
            predictor.read_ahead()
            assert predictor._ahead._reading is None


@pytest.mark.parametrize(("cores", "threads", "free"), [(1, 1, False), (2, 1, True), (3, 2, False), (8, 4, True)])
def test_a_core_is_free_for_each_thread(cores: int, threads: int, free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(read_ahead.torch, "get_num_threads", lambda: threads)
    assert has_free_core() == free
