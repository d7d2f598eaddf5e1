"""Bit-exact encoding of a checkpoint part's state as JSON plus tensors. Nothing is pickled."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SAFETENSORS_DTYPES = {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}
_SAFETENSORS_DTYPES |= {"float16", "bfloat16", "float32", "float64"}
"""Dtypes that every safetensors reader supports; any other is stored as raw bytes."""


class TensorCollector:
    """Collects the tensors of one part for its safetensors file."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._storages: set[int] = set()

    def add(self, value: Any, path: str) -> dict[str, Any] | None:
        """Collect `value` and return its JSON reference; None if it is neither a tensor nor an array."""
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                raise TypeError(f"{path}: only dense, materialized tensors can be saved")
            dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            dtype = str(value.dtype).removeprefix("torch.")
            flat = dense if dtype in _SAFETENSORS_DTYPES else dense.reshape(-1).view(torch.uint8)
            return {"$tensor": self._keep(flat, path), "dtype": dtype, "shape": list(value.shape)}
        if isinstance(value, np.ndarray | np.generic):
            array = np.array(value, order="C")
            dtype = array.dtype.str
            if array.dtype.hasobject or array.dtype.kind == "V":
                raise TypeError(f"{path}: an array of {array.dtype} cannot be saved")
            if not (array.dtype.isnative and array.dtype.name in _SAFETENSORS_DTYPES):
                array = np.frombuffer(bytearray(array.tobytes()), np.uint8)
            tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
            return {tag: self._keep(torch.from_numpy(array), path), "dtype": dtype, "shape": list(value.shape)}
        return None

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name = path.encode("utf-8", "replace").decode()
        while name in self.by_name:
            name += "'"
        storage = tensor.untyped_storage().data_ptr()
        # safetensors rejects tensors that share memory
        self.by_name[name] = tensor.clone() if storage in self._storages else tensor
        self._storages.add(storage)
        return name


def encode(value: Any, path: str, tensors: TensorCollector) -> Any:
    """`value` as JSON. What JSON cannot express becomes an object whose first key begins with `$`."""
    if value is None or isinstance(value, bool):
        return value
    if reference := tensors.add(value, path):  # before the number checks: a numpy float is also a float
        return reference
    if isinstance(value, int):  # hex: Python does not limit the number of hex digits
        return value if abs(value) < 2**63 else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, str):
        return value if _has_no_surrogates(value) else {"$text": [ord(char) for char in value]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{path}: a key must be a str or an int, got {key!r}")
        items = [[key, encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        if all(isinstance(key, str) and _has_no_surrogates(key) and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": [[encode(key, path, tensors), item] for key, item in items]}
    raise TypeError(f"{path}: a {type(value).__name__} cannot be saved, only plain values and tensors")


def _has_no_surrogates(text: str) -> bool:
    """False if `text` contains surrogates: JSON would join two of them into one character."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    match tag:
        case "$tensor" | "$array" | "$scalar":
            return _unpack(tag, tensors[value[tag]], value["dtype"], tuple(value["shape"]))
        case "$int":
            return int(value[tag], 16)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(value[tag]))[0]
        case "$text":
            return "".join(map(chr, value[tag]))
        case "$tuple":
            return tuple(decode(value[tag], tensors))
        case "$dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in value[tag]}
    return {key: decode(item, tensors) for key, item in value.items()}


def _unpack(tag: str, stored: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy as np
    import torch

    owned = stored.clone()  # the loaded tensor is a view into a file that is pruned later
    if tag == "$tensor":
        wanted = getattr(torch, dtype)
        return owned if owned.dtype == wanted else owned.view(wanted).reshape(shape)
    array = owned.numpy()
    if array.dtype != np.dtype(dtype):
        array = np.frombuffer(bytearray(array.tobytes()), dtype).reshape(shape)
    return array if tag == "$array" else array[()]
