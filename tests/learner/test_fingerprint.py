"""Weight fingerprints: equal for equal weights, different after the smallest update."""

from __future__ import annotations

import copy

import pytest
import torch
from learner_cases import tiny_model

from toolwise.learner.fingerprint import checksum, fingerprint


def test_equal_weights_have_equal_fingerprints() -> None:
    assert fingerprint(tiny_model()) == fingerprint(copy.deepcopy(tiny_model()))
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(seed=1))


def test_a_small_update_changes_the_fingerprint() -> None:
    model = tiny_model()
    before = fingerprint(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1e-6)
    assert fingerprint(model) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_notices_one_bit_and_nothing_else(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    before = checksum(model.parameters())
    assert checksum(copy.deepcopy(model).parameters()) == before
    weight = next(w for w in model.parameters() if w.ndim == 2)
    with torch.no_grad():
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0, dtype=dtype))
    assert checksum(model.parameters()) != before


def test_a_checksum_detects_changes_that_cancel_out() -> None:
    model = tiny_model()
    before = checksum(model.parameters())
    weight = next(w for w in model.parameters() if w.ndim == 2)
    with torch.no_grad():
        weight[:, [0, 1]] = weight[:, [1, 0]]
    assert checksum(model.parameters()) != before


def test_a_checksum_covers_trainable_weights_only() -> None:
    model = tiny_model()
    frozen = next(model.parameters()).requires_grad_(False)
    before = checksum(model.parameters())
    with torch.no_grad():
        frozen.add_(1.0)
    assert checksum(model.parameters()) == before
