"""A name for weights: equal for equal ones, another after the smallest update."""

from __future__ import annotations

import copy

import torch
from learner_cases import tiny_model

from toolwise.learner.fingerprint import fingerprint, matches


def test_the_same_weights_have_the_same_name_wherever_they_are() -> None:
    assert fingerprint(tiny_model()) == fingerprint(copy.deepcopy(tiny_model()))
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(seed=1))


def test_a_small_update_gives_another_name() -> None:
    model = tiny_model()
    before = fingerprint(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1e-6)
    assert fingerprint(model) != before
    assert not matches(model, before)


def test_a_copy_of_less_precision_is_judged_by_what_it_can_hold() -> None:
    model = tiny_model()
    half = copy.deepcopy(model).bfloat16()
    assert fingerprint(half).startswith("bfloat16:")
    assert matches(model, fingerprint(half))
    assert not matches(tiny_model(seed=1), fingerprint(half))


def test_what_is_no_fingerprint_matches_nothing() -> None:
    assert not matches(tiny_model(), "")
    assert not matches(tiny_model(), "nonsense:12")
