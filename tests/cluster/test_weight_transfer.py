"""Weights as whole copies and bitwise differences, with checksums, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolwise.cluster.interface import RefusedError, check_payload, payload_bytes
from toolwise.cluster.weight_transfer import _sealed, bits_of, difference, install, transferred_weights, whole_copy


def weights(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(300, 70, generator=generator).to(dtype),
        "b": torch.randn(5, generator=generator).to(dtype),
        "scale": torch.tensor(1.5).to(dtype),
    }


def updated(old: dict[str, torch.Tensor], lr: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {n: (w.float() + lr * torch.randn(w.shape, generator=generator)).to(w.dtype) for n, w in old.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_whole_copy_arrives_bit_by_bit(dtype: torch.dtype) -> None:
    source, target = weights(dtype), weights(dtype, seed=1)
    source["b"][0] = -0.0
    payload = check_payload(whole_copy(bits_of(source), 7, "print"))
    assert install(target, payload, 3) == (7, "print")
    assert bits_of(target).keys() == bits_of(source).keys()
    assert all(np.array_equal(bits, bits_of(source)[name]) for name, bits in bits_of(target).items())


def test_a_small_step_in_bf16_is_sent_as_its_difference() -> None:
    old = weights(torch.bfloat16)
    new = updated(old, 1e-5)
    payload = difference(bits_of(new), bits_of(old), 2, 1, "print")
    assert payload is not None
    assert payload_bytes(payload) < 0.1 * payload_bytes(whole_copy(bits_of(new), 2, "print"))
    install(old, payload, 1)
    assert all(torch.equal(old[name], new[name]) for name in new)


def test_who_keeps_something_made_of_the_weights_can_see_that_they_changed() -> None:
    """Such as the products of merged adapters."""
    old, new = weights(torch.bfloat16), updated(weights(torch.bfloat16), 1e-5)
    changes = difference(bits_of(new), bits_of(old), 2, 1, "print")
    assert changes is not None
    for payload in (whole_copy(bits_of(old), 1, "print"), changes):
        before = old["a"]._version
        install(old, payload, 1)
        assert old["a"]._version > before


def test_weights_that_are_not_contiguous_are_written() -> None:
    source = {"a": torch.randn(3, 4)}
    target = {"a": torch.zeros(4, 3).t()}
    install(target, whole_copy(bits_of(source), 1, "print"), 0)
    assert torch.equal(target["a"], source["a"])


def test_a_step_in_fp32_is_sent_as_a_whole() -> None:
    old = weights(torch.float32)
    assert difference(bits_of(updated(old, 1e-3)), bits_of(old), 2, 1, "print") is None


def test_equal_weights_have_an_empty_difference() -> None:
    old = weights(torch.float32)
    payload = difference(bits_of(old), bits_of(old), 2, 1, "print")
    assert payload is not None
    assert install(old, payload, 1)[0] == 2


def damaged(payload: dict[str, Any]) -> dict[str, Any]:
    changed = payload["all:a"].copy()
    changed[17] ^= 1
    return {**payload, "all:a": changed}


@pytest.mark.parametrize(
    ("change", "current", "reason"),
    [
        (damaged, 1, "damaged"),
        (lambda payload: {**payload, "version": 9}, 1, "damaged"),
        (lambda payload: {n: v for n, v in payload.items() if n != "checksum"}, 1, "damaged"),
        (lambda payload: payload, 3, "do not follow"),
    ],
)
def test_what_is_damaged_or_old_is_refused_and_changes_nothing(change: Any, current: int, reason: str) -> None:
    target = weights(torch.float32)
    before = bits_of(target)
    payload = change(whole_copy(bits_of(weights(torch.float32, seed=1)), 2, "print"))
    with pytest.raises(RefusedError, match=reason):
        install(target, payload, current)
    assert all(np.array_equal(before[name], bits) for name, bits in bits_of(target).items())


def test_a_difference_from_another_version_is_refused() -> None:
    old = weights(torch.bfloat16)
    payload = difference(bits_of(updated(old, 1e-5)), bits_of(old), 3, 2, "print")
    assert payload is not None
    with pytest.raises(RefusedError, match="do not follow"):
        install(old, payload, 1)


def test_weights_of_another_model_are_refused() -> None:
    payload = whole_copy(bits_of({"other": torch.zeros(3)}), 1, "print")
    with pytest.raises(RefusedError, match="another model"):
        install(weights(torch.float32), payload, 0)


def test_only_adapters_are_sent_if_there_are_any() -> None:
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 3), "lora_A": torch.nn.Linear(3, 1, bias=False)})
    named = torch.nn.ModuleDict({"x": model})
    assert list(transferred_weights(named)) == ["x.lora_A.weight"]
    assert len(transferred_weights(model["layer"])) == 2


ONE = np.array([1.0], dtype=np.float32).view(np.int32)
GOOD = {"at:a": np.array([0], np.int32), "to:a": ONE}


@pytest.mark.parametrize(
    ("parts", "base", "reason"),
    [
        ({**GOOD, "at:b": np.array([9], np.int32), "to:b": ONE}, 0, "places outside of b"),
        ({**GOOD, "at:b": np.array([-1], np.int32), "to:b": ONE}, 0, "places outside of b"),
        ({**GOOD, "at:b": np.arange(4, dtype=np.int32), "to:b": ONE}, 0, "1 values for 4 places of b"),
        ({**GOOD, "at:b": np.array([0.0]), "to:b": ONE}, 0, "places of b"),
        ({**GOOD, "to:b": ONE}, 0, "no places for b"),
        ({**GOOD, "at:b": np.array([0], np.int32), "to:b": ONE.astype(np.int64)}, 0, "b came as int64"),
        ({"all:a": np.zeros(4, np.int32), "all:b": np.full(4, 7.9)}, -1, "b came as float64"),
        ({"all:a": np.zeros(4, np.int32), "all:b": np.zeros(3, np.int32)}, -1, "b came with 3 values"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(parts: dict[str, Any], base: int, reason: str) -> None:
    target = {"a": torch.full((4,), 2.0), "b": torch.full((4,), 2.0)}
    with pytest.raises(RefusedError, match=reason):
        install(target, _sealed(parts, 1, base, "print"), 0)
    assert all(weight.tolist() == [2.0] * 4 for weight in target.values())
