"""The reference stays at the initial policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from learner_cases import LR, changed, current_logprobs, same, sample, tiny_model, weights

from toolwise.learner.actor import Actor
from toolwise.learner.reference import build_reference


def test_a_frozen_copy_does_not_follow_the_policy() -> None:
    model = tiny_model()
    held = build_reference(model, None)
    before = weights(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    assert same(weights(held), before)
    assert not any(weight.requires_grad for weight in held.parameters())
    assert not held.training


def test_no_reference_is_copied_unless_needed() -> None:
    assert Actor(tiny_model(), LR).reference is None
    assert Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "loss"}})).reference is not None
    assert Actor(tiny_model(), LR, needs=frozenset({"ref_logprobs"})).reference is not None


def test_a_resumed_run_keeps_the_same_reference(tmp_path: Path) -> None:
    """The reference is built before the checkpoint's weights are loaded."""
    first = Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "loss", "kl_coef": 0.01}}))
    credited = sample(first.model, [1.0, -1.0])
    scored = [c.annotated.scored for c in credited]
    began = first.annotate(scored)
    first.update([replace(c, annotated=a) for c, a in zip(credited, began, strict=True)])
    first.save_model(tmp_path)
    second = Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "loss", "kl_coef": 0.01}}))
    second.load_state_dict(first.state_dict())
    second.load_weights(tmp_path)
    for a, b in zip(began, second.annotate(scored), strict=True):
        assert a.ref_logprobs is not None
        assert b.ref_logprobs is not None
        assert [x.tolist() for x in a.ref_logprobs] == [x.tolist() for x in b.ref_logprobs]
    assert current_logprobs(second, credited).tolist() != first.annotate(scored)[0].ref_logprobs
