"""Weights on their way to the rollout workers: all of them, or the bits that changed since the version before.

In bfloat16 one to two weights of a hundred change in a step, so that the difference (positions and new bits) is a
twentieth of the whole; in float32 nearly all change, and the whole is sent. Each transfer has a checksum and the
fingerprint of the model that results; versions are installed in order. With LoRA only the adapters are sent.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from toolwise.cluster.interface import Payload, RefusedError
from toolwise.concurrency.threads import core_count
from toolwise.models.merged_weights import is_adapter_weight

SMALL = 0.5
"""A difference is sent if it takes less than this share of the whole."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
MAX_THREADS = 8
"""Copies, comparisons and checksums of tensors are divided among so many threads, at most one for each core."""
Bits = dict[str, "np.ndarray[Any, Any]"]
T = TypeVar("T")
R = TypeVar("R")


def transferred_weights(model: Any) -> dict[str, Tensor]:
    """What is sent: the adapters if the model has any, else all parameters. Tied weights are there once."""
    parameters = dict(model.named_parameters())
    adapters = {name: weight for name, weight in parameters.items() if is_adapter_weight(name)}
    return adapters or parameters


def bits_of(weights: Mapping[str, Tensor], buffers: Bits | None = None) -> Bits:
    """A copy of the weights as integers in CPU memory: in `buffers`, those of an earlier copy, or in new memory, whose
    first use costs more than the copy."""

    def copy(name: str) -> np.ndarray[Any, Any]:
        source = weights[name].detach().contiguous().view(BITS[weights[name].element_size()]).flatten()
        target = np.empty(len(source), DTYPES[source.element_size()]) if buffers is None else buffers[name]
        torch.from_numpy(target).copy_(source)
        return target

    return dict(zip(weights, in_threads(copy, weights), strict=True))


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of `work`, in order."""
    with ThreadPoolExecutor(min(MAX_THREADS, core_count())) as threads:
        return list(threads.map(work, items))


def whole_copy(bits: Bits, version: int, fingerprint: str) -> dict[str, Any]:
    return _sealed({f"all:{name}": values for name, values in bits.items()}, version, -1, fingerprint)


def difference(new: Bits, old: Bits, version: int, base: int, fingerprint: str) -> dict[str, Any] | None:
    """None if it is not much smaller than the whole."""
    left = SMALL * sum(values.nbytes for values in new.values())
    lock = threading.Lock()

    def compare(name: str) -> dict[str, Any]:
        nonlocal left
        if left < 0:
            return {}
        values = new[name]
        places = np.flatnonzero(values != old[name])
        if not len(places):
            return {}
        places = places.astype(np.int32 if len(values) < 2**31 else np.int64)
        parts = {f"at:{name}": places, f"to:{name}": values[places]}
        with lock:
            left -= sum(part.nbytes for part in parts.values())
        return parts

    found = in_threads(compare, new)
    if left < 0:
        return None
    return _sealed({key: value for parts in found for key, value in parts.items()}, version, base, fingerprint)


def _sealed(parts: dict[str, Any], version: int, base: int, fingerprint: str) -> dict[str, Any]:
    header = json.dumps({"names": sorted(parts), "fingerprint": fingerprint}).encode("ascii")
    sealed = {**parts, "header": header, "version": version, "base": base}
    return {**sealed, "checksum": _checksum(sealed)}


def _checksum(parts: Mapping[str, Any]) -> bytes:
    def digest(name: str) -> bytes:
        value = parts[name]
        data = value if isinstance(value, bytes) else np.ascontiguousarray(value).data
        return hashlib.blake2b(data, digest_size=16).digest()

    names = sorted(parts)
    lines = [[name, found.hex()] for name, found in zip(names, in_threads(digest, names), strict=True)]
    return hashlib.blake2b(json.dumps(lines).encode(), digest_size=16).digest()


@torch.no_grad()
def install(weights: Mapping[str, Tensor], payload: Payload, current: int) -> tuple[int, str]:
    """Write a transfer into `weights`, which are those of version `current`; return its version and the fingerprint
    that the model must have then. Raises `RefusedError`, before anything is changed, if it is damaged, older, a
    difference from another version, or does not fit the model."""
    parts: dict[str, Any] = dict(payload)
    if parts.pop("checksum", b"") != _checksum(parts):
        raise RefusedError("the weights arrived damaged: their checksum is wrong")
    version, base = int(parts["version"]), int(parts["base"])
    if version < current or base not in (-1, current):
        raise RefusedError(f"weights of version {version} from {base} do not follow on version {current}")
    header = json.loads(parts["header"])
    names = {name.partition(":")[2] for name in header["names"]}
    if not names <= weights.keys() or (base == -1 and names != weights.keys()):
        raise RefusedError("the weights are those of another model")
    for name in names:
        _check_part(name, weights[name], parts, whole=base == -1)
    in_threads(lambda name: _write(weights[name], name, parts, whole=base == -1), names)
    return version, str(header["fingerprint"])


@torch.no_grad()
def _write(weight: Tensor, name: str, parts: Mapping[str, Any], *, whole: bool) -> None:
    target = weight.detach().contiguous()
    bits = target.view(BITS[target.element_size()]).view(-1)
    if bits.device.type == "cpu":
        where: Any = slice(None) if whole else parts[f"at:{name}"]
        bits.numpy()[where] = parts[f"all:{name}" if whole else f"to:{name}"]
    elif whole:
        bits.copy_(torch.from_numpy(np.array(parts[f"all:{name}"])))
    else:
        places = torch.from_numpy(parts[f"at:{name}"].astype(np.int64)).to(bits.device)
        bits[places] = torch.from_numpy(np.array(parts[f"to:{name}"])).to(bits.device)
    if target.data_ptr() != weight.data_ptr():
        weight.copy_(target)
    torch.autograd.graph.increment_version(weight)  # numpy writes unseen; merged adapters depend on it


def _check_part(name: str, weight: Tensor, parts: Mapping[str, Any], *, whole: bool) -> None:
    """Raise `RefusedError` unless the values, and the places of a difference, are those of such a tensor."""
    keys = [f"all:{name}"] if whole else [f"to:{name}", f"at:{name}"]
    if any(not isinstance(parts.get(key), np.ndarray) or parts[key].ndim != 1 for key in keys):
        raise RefusedError(f"the weights have no values or no places for {name}")
    values = parts[keys[0]]
    if values.dtype != DTYPES[weight.element_size()]:
        raise RefusedError(f"the weights have another dtype: {name} came as {values.dtype}")
    if whole:
        if len(values) != weight.numel():
            raise RefusedError(f"the weights have other shapes: {name} came with {len(values)} values")
        return
    places = parts[keys[1]]
    if len(places) != len(values) or places.dtype not in (np.int32, np.int64):
        raise RefusedError(f"the weights have {len(values)} values for {len(places)} places of {name}")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < weight.numel():
        raise RefusedError(f"the weights have places outside of {name}")
