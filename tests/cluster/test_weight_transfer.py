"""Weights as whole copies and bitwise differences, with checksums, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolwise.cluster import weight_transfer
from toolwise.cluster.interface import RefusedError, check_payload, payload_bytes
from toolwise.cluster.weight_transfer import SentWeights, _sealed, bits_of, install, transferred_weights, whole_copy


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


def difference(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor], version: int, base: int) -> Any:
    sent = SentWeights()
    assert sent.take(old, base, "old") is None
    return sent.take(new, version, "print")


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
    payload = difference(new, old, 2, 1)
    assert payload is not None
    assert payload_bytes(payload) < 0.1 * payload_bytes(whole_copy(bits_of(new), 2, "print"))
    install(old, payload, 1)
    assert all(torch.equal(old[name], new[name]) for name in new)


def test_who_keeps_something_made_of_the_weights_can_see_that_they_changed() -> None:
    """Such as the products of merged adapters."""
    old, new = weights(torch.bfloat16), updated(weights(torch.bfloat16), 1e-5)
    changes = difference(new, old, 2, 1)
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
    assert difference(updated(old, 1e-3), old, 2, 1) is None


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_versions_follow_in_the_same_memory(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Small steps, a large one, one that nobody compares, and small ones again, whatever the chunks."""
    monkeypatch.setattr(weight_transfer, "CHUNK", chunk)
    current = {"a": weights(torch.bfloat16)["a"][:3], "b": weights(torch.bfloat16)["b"]}
    target, sent, memory = {name: torch.zeros_like(w) for name, w in current.items()}, SentWeights(), set[int]()
    had = 0
    for version, (lr, compare) in enumerate([(0, 1), (1e-4, 1), (1.0, 1), (1e-4, 0), (1e-4, 1), (0.0, 1)], start=1):
        current = updated(current, lr)
        changes = sent.take(current, version, f"print {version}", compare=bool(compare))
        assert (changes is None) == (version in (1, 3, 4))
        memory |= {id(bits) for bits in sent.bits.values()}
        assert install(target, sent.whole() if changes is None else changes, had) == (version, f"print {version}")
        assert all(torch.equal(target[name], current[name]) for name in current)
        had = version
    assert len(memory) == len(current)


def test_after_a_version_that_was_not_taken_whole_no_difference_is_sent() -> None:
    sent, old = SentWeights(), weights(torch.bfloat16)
    sent.take(old, 1, "print")
    sent.begin()
    sent.add({"a": updated(old, 1e-5)["a"]})  # and the others could not be gathered
    assert sent.take(old, 3, "print") is None


def test_equal_weights_have_an_empty_difference() -> None:
    old = weights(torch.float32)
    payload = difference(old, old, 2, 1)
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
    payload = difference(updated(old, 1e-5), old, 3, 2)
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
