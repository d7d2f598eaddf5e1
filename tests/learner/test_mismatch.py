"""The mismatch check stops a run whose policy and learner disagree, before any weight moves, and names the cause."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_cases import changed, credit, current_logprobs, same, sample, tiny_model, weights

from toolwise.config.schema import RunConfig
from toolwise.errors import ToolwiseError
from toolwise.learner.actor import Actor
from toolwise.learner.mismatch import Evidence, MismatchError, check_logprobs, diagnose
from toolwise.types import CreditedRollout

torch.set_num_threads(1)
STOP = changed(RunConfig(), lr=1e-2)

Change = Callable[[list[float]], list[float]]


def with_logprobs(credited: CreditedRollout, change: Change, *, version: int | None = None) -> CreditedRollout:
    """The same tokens with changed log-probs."""
    turns = [
        (s.policy_logprobs["prompt_ids"], s.policy_logprobs["token_ids"], change(s.policy_logprobs["logprobs"]))
        for s in credited.steps
        if s.policy_logprobs
    ]
    return credit(turns, float(credited.advantages[0][0]), name=credited.rollout.rollout_id, version=version)


def stopped(actor: Actor, credited: list[CreditedRollout]) -> MismatchError:
    before = weights(actor.model)
    with pytest.raises(MismatchError) as caught:
        actor.update(credited)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ToolwiseError)
    assert same(weights(actor.model), before)  # nothing was learned from it
    assert all(weight.grad is None for weight in actor.model.parameters())
    return caught.value


def test_agreement_is_reported_and_passes() -> None:
    model = tiny_model()
    metrics = Actor(model, STOP).update(sample(model, [1.0, -1.0], version=0))
    assert metrics["canary/logprob_gap_mean"] <= metrics["canary/logprob_gap_max"] < 1e-4


def test_stale_weights_by_their_version() -> None:
    """The policy missed an update: its tokens say version 0 and the learner is at 1."""
    model = tiny_model()
    held = copy.deepcopy(model)
    actor = Actor(model, changed(STOP, lr=0.05))
    actor.update(sample(held, [1.0, -1.0], seed=1, version=0))
    error = stopped(actor, sample(held, [1.0, -1.0, 0.5], seed=2, version=0))
    assert error.cause == "stale weights"
    assert "policy version 0, the learner is at 1" in str(error)


def test_diagnoses_another_temperature() -> None:
    model = tiny_model()
    error = stopped(Actor(model, STOP), sample(model, [1.0, -1.0, 0.5, 0.2], temperature=0.7))
    assert error.cause == "temperature"
    assert "they agree at temperature 0.7 but the learner uses 1" in str(error)


def test_diagnoses_logprobs_taken_before_temperature() -> None:
    model = tiny_model()
    raw = Actor(model, STOP)
    credited = sample(model, [1.0, -1.0, 0.5], temperature=1.5)
    flat = iter(current_logprobs(raw, credited).tolist())
    untempered = [with_logprobs(c, lambda old: [next(flat) for _ in old]) for c in credited]
    error = stopped(Actor(model, changed(STOP, {"rollout": {"temperature": 1.5}})), untempered)
    assert error.cause == "temperature"
    assert "temperature 1 but the learner uses 1.5" in str(error)


def test_truncated_sampling_makes_tokens_likelier_and_never_less_likely() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -1.0, 0.5, 0.1], turns=4)
    nucleus = [with_logprobs(c, lambda old: [value + 0.3 * (i % 2) for i, value in enumerate(old)]) for c in credited]
    assert stopped(Actor(model, STOP), nucleus).cause == "top-p or top-k"


def test_another_precision_is_a_small_gap_everywhere() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -1.0, 0.5])
    rounded = [with_logprobs(c, lambda old: torch.tensor(old).bfloat16().tolist()) for c in credited]
    assert stopped(Actor(model, STOP), rounded).cause == "precision"


def test_rows_whose_prompt_is_not_what_the_policy_saw() -> None:
    model = tiny_model()
    good = sample(model, [1.0, -1.0, 0.5])
    [bad] = sample(model, [1.0], seed=7, turns=1)
    tokens = bad.steps[0].policy_logprobs or {}
    other = credit([([2, *tokens["prompt_ids"]], tokens["token_ids"], tokens["logprobs"])], 1.0, name="bad")
    error = stopped(Actor(model, STOP), [*good, other])
    assert error.cause == "template"
    assert "1 of 4 rows disagree" in str(error)


def test_another_model_altogether() -> None:
    credited = sample(tiny_model(), [1.0, -1.0, 0.5])
    assert stopped(Actor(tiny_model(seed=1), STOP), credited).cause == "other weights"


def test_it_can_warn_or_be_off(caplog: pytest.LogCaptureFixture) -> None:
    credited = sample(tiny_model(), [1.0, -1.0])
    with caplog.at_level(logging.WARNING):
        metrics = Actor(tiny_model(seed=1), changed(STOP, mismatch_check="off")).update(credited)
        assert metrics["canary/logprob_gap_mean"] > 0.1
        assert caplog.text == ""
        Actor(tiny_model(seed=1), changed(STOP, mismatch_check="warn")).update(credited)
    assert "policy and learner disagree" in caplog.text


@pytest.mark.parametrize(("gap", "fits"), [(0.9e-3, True), (1.1e-3, False)])
def test_in_fp32_the_limit_is_on_the_largest_gap(gap: float, fits: bool) -> None:
    assert passes(torch.tensor([0.0] * 99 + [gap]), torch.float32) is fits


@pytest.mark.parametrize(("gap", "fits"), [(0.049, True), (0.051, False)])
def test_in_half_precision_the_limit_is_on_the_mean_gap(gap: float, fits: bool) -> None:
    assert passes(torch.full((100,), gap), torch.bfloat16) is fits
    assert passes(torch.tensor([0.0] * 99 + [100 * gap]), torch.bfloat16) is fits


def test_nan_gaps_do_not_pass() -> None:
    assert not passes(torch.tensor([0.0, float("nan")]), torch.float32)
    assert not passes(torch.tensor([0.0, float("nan")]), torch.bfloat16)


def evidence(gaps: torch.Tensor, **changes: Any) -> Evidence:
    none = torch.full((len(gaps),), -1)
    plain = Evidence(gaps, torch.zeros(len(gaps)), none, 0, 1.0, probe=lambda at: float(gaps.abs().mean()))
    return replace(plain, **changes)


def passes(gaps: torch.Tensor, dtype: torch.dtype) -> bool:
    try:
        check_logprobs(evidence(gaps), dtype, "stop")
    except MismatchError:
        return False
    return True


def test_unknown_versions_do_not_count_as_stale() -> None:
    assert diagnose(evidence(torch.full((9,), 2.0)))[0] == "other weights"
