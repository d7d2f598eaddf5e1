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
CHUNK = 1 << 22
"""Weights that are compared at a time."""
Bits = dict[str, "np.ndarray[Any, Any]"]
Change = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]
"""Where bits changed, and what they are now."""
T = TypeVar("T")
R = TypeVar("R")


def transferred_weights(model: Any) -> dict[str, Tensor]:
    """What is sent: the adapters if the model has any, else all parameters. Tied weights are there once."""
    parameters = dict(model.named_parameters())
    adapters = {name: weight for name, weight in parameters.items() if is_adapter_weight(name)}
    return adapters or parameters


def bits_of(weights: Mapping[str, Tensor]) -> Bits:
    """A copy of the weights as integers in CPU memory."""
    return {name: _as_integers(weight).cpu().numpy().copy() for name, weight in weights.items()}


def _as_integers(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().view(BITS[weight.element_size()]).flatten()


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of `work`, in order."""
    with ThreadPoolExecutor(min(MAX_THREADS, core_count())) as threads:
        return list(threads.map(work, items))


def whole_copy(bits: Bits, version: int, fingerprint: str) -> dict[str, Any]:
    return _sealed({f"all:{name}": values for name, values in bits.items()}, version, -1, fingerprint)


class SentWeights:
    """The bits of the version that was sent last, as what the next one differs from and for who needs all of it.

    There is one copy of the weights, which each version is written into: the first use of new memory costs ten times
    the copy. Weights are compared in chunks, so that nothing else becomes large.
    """

    def __init__(self) -> None:
        self.bits: Bits = {}
        self.version: int | None = None
        """None if the bits are those of no version, or nobody has them."""
        self.fingerprint = ""
        self._base: int | None = None
        self._changes: dict[str, list[Change]] = {}
        self._left = 0.0
        """Bytes that a difference may still take."""
        self._lock = threading.Lock()

    def take(
        self, weights: Mapping[str, Tensor], version: int, fingerprint: str, *, compare: bool = True
    ) -> dict[str, Any] | None:
        """Replace the bits; returns what changed, or None if that is not much smaller than the whole."""
        self.begin(compare=compare)
        self.add(weights)
        return self.finish(version, fingerprint)

    def begin(self, *, compare: bool = True) -> None:
        self._base, self.version, self._changes = self.version if compare else None, None, {}
        self._left = SMALL * sum(values.nbytes for values in self.bits.values())

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Some of the weights of the next version."""
        sources = {name: _as_integers(weight) for name, weight in weights.items()}
        for name, source in sources.items():
            if name not in self.bits:
                self.bits[name] = np.empty(len(source), DTYPES[source.element_size()])
        chunks = [(name, start) for name, source in sources.items() for start in range(0, len(source), CHUNK)]

        def replace(chunk: tuple[str, int]) -> Change | None:
            name, start = chunk
            return self._replace(name, start, sources[name][start : start + CHUNK].cpu().numpy())

        for (name, _), change in zip(chunks, in_threads(replace, chunks), strict=True):
            if change is not None:
                self._changes.setdefault(name, []).append(change)

    def _replace(self, name: str, start: int, new: np.ndarray[Any, Any]) -> Change | None:
        whole = self.bits[name]
        old = whole[start : start + len(new)]
        if self._base is None or self._left < 0:
            old[...] = new
            return None
        places = np.flatnonzero(new != old)
        if not len(places):
            return None
        values = new[places]
        old[places] = values
        places = (places + start).astype(np.int32 if len(whole) < 2**31 else np.int64)
        with self._lock:
            self._left -= places.nbytes + values.nbytes
        return places, values

    def finish(self, version: int, fingerprint: str) -> dict[str, Any] | None:
        base, changes = self._base, self._changes
        self.version, self.fingerprint, self._changes = version, fingerprint, {}
        if base is None or self._left < 0:
            return None
        parts: dict[str, Any] = {}
        for name, pairs in changes.items():
            places, values = zip(*pairs, strict=True)
            parts |= {f"at:{name}": np.concatenate(places), f"to:{name}": np.concatenate(values)}
        return _sealed(parts, version, base, fingerprint)

    def whole(self) -> dict[str, Any]:
        """All of it. Its arrays are those that the next version is written into."""
        assert self.version is not None
        return whole_copy(self.bits, self.version, self.fingerprint)


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
