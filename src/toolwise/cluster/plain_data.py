"""Nested plain data as a payload and back: JSON text for its structure, arrays beside it. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from toolwise.cluster.interface import ClusterError, Payload
from toolwise.serialization.state import TensorCollector, decode, encode

STRUCTURE, ARRAY = "json", "array:"


def to_payload(value: Any, what: str = "value") -> dict[str, Any]:
    """Dicts, lists, tuples, text, numbers, arrays and tensors; raises for anything else."""
    tensors = TensorCollector()
    try:
        text = json.dumps(encode(value, what, tensors), allow_nan=False)
    except (TypeError, ValueError) as fault:
        raise ClusterError(f"cannot be sent to another process: {fault}") from None
    arrays = {f"{ARRAY}{name}": _as_bits(tensor) for name, tensor in tensors.by_name.items()}
    return {STRUCTURE: text.encode("ascii"), **arrays}


def from_payload(payload: Payload) -> Any:
    import torch

    text = payload[STRUCTURE]
    assert isinstance(text, bytes)
    tensors: Mapping[str, torch.Tensor] = {
        name.removeprefix(ARRAY): torch.from_numpy(np.array(value))  # a copy: what the object store holds is read-only
        for name, value in payload.items()
        if name.startswith(ARRAY)
    }
    return decode(json.loads(text), tensors)


def _as_bits(tensor: Any) -> Any:
    """numpy has no bfloat16: its bits as int16, which `decode` reads back by the recorded dtype."""
    import torch

    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
