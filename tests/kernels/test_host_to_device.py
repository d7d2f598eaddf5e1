"""Copying arrays to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolwise.kernels.host_to_device import to_device

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_values_are_copied_unchanged(device: str, dtype: type) -> None:
    values = np.arange(12, dtype=dtype).reshape(3, 4)
    for sent in (values, values.T, values[:0], values[::2, 1:]):
        found = to_device(sent, device)
        assert found.device.type == device
        assert found.is_contiguous()
        np.testing.assert_array_equal(found.cpu().numpy(), sent)
        assert found.cpu().numpy().dtype == dtype
