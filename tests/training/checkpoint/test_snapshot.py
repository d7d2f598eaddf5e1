"""Copies of a state: complete, independent of the original, in memory that is reused."""

from __future__ import annotations

import numpy as np
import torch

from toolwise.training.checkpoint.snapshot import TensorCopies, freeze


def test_what_changes_after_the_freeze_and_the_copy_is_not_in_it() -> None:
    weight, numbers, array = torch.ones(3), [1, 2], np.zeros(2)
    frozen = freeze({"w": weight, "n": {"numbers": numbers, "both": (weight, "text")}, 3: array})
    numbers.append(3)
    array += 1.0
    copied = TensorCopies().copy(frozen)
    weight.add_(1.0)
    assert copied["w"].tolist() == [1.0, 1.0, 1.0]
    assert copied["n"]["numbers"] == [1, 2]
    assert copied["n"]["both"][0] is copied["w"]  # tied weights stay tied
    assert copied["n"]["both"][1] == "text"
    assert copied[3].tolist() == [0.0, 0.0]


def test_every_dtype_shape_and_stride_is_copied_bit_by_bit() -> None:
    state = [
        torch.randn(4, 5).T,
        torch.randn(6)[::2],
        torch.randn(3, 2).to(torch.bfloat16),
        torch.tensor(7.0),
        torch.zeros(0, 4),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.uint8),
        torch.nn.Parameter(torch.randn(2)),
    ]
    copied = TensorCopies().copy(freeze(state))
    for before, after in zip(state, copied, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert torch.equal(after, before.detach())
        assert not after.requires_grad
    storages = {tensor.untyped_storage().data_ptr() for tensor in copied if tensor.numel()}
    assert len(storages) == 7  # safetensors takes a shared storage for tied weights


def test_the_memory_is_reused_until_the_state_has_another_shape() -> None:
    copies = TensorCopies()
    state = {"w": torch.zeros(5), "m": torch.zeros(2, 2)}
    assert copies.missing_bytes(freeze(state)) == 36
    first = copies.copy(freeze(state))
    state["w"] += 1.0
    assert copies.missing_bytes(freeze(state)) == 0
    second = copies.copy(freeze(state))
    assert [second[name].data_ptr() for name in "wm"] == [first[name].data_ptr() for name in "wm"]
    assert second["w"].tolist() == [1.0] * 5
    more = freeze({**state, "moments": torch.ones(3)})
    assert copies.missing_bytes(more) == 12
    assert copies.copy(more)["moments"].tolist() == [1.0] * 3
