"""Weights on their way to the rollout workers: all of them, or the bits that changed since the version before.

In bfloat16 one to two weights of a hundred change in a step, so that the difference (positions and new bits) is a
twentieth of the whole; in float32 nearly all change, and the whole is sent. Each transfer has a checksum and the
fingerprint of the model that results; versions are installed in order. With LoRA only the adapters are sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.cluster.interface import Payload, RefusedError
from toolwise.models.merged_weights import is_adapter_weight

SMALL = 0.5
"""A difference is sent if it takes less than this share of the whole."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
Bits = dict[str, "np.ndarray[Any, Any]"]


def transferred_weights(model: Any) -> dict[str, Tensor]:
    """What is sent: the adapters if the model has any, else all parameters. Tied weights are there once."""
    parameters = dict(model.named_parameters())
    adapters = {name: weight for name, weight in parameters.items() if is_adapter_weight(name)}
    return adapters or parameters


def bits_of(weights: Mapping[str, Tensor]) -> Bits:
    """A copy of the weights as integers in CPU memory."""
    return {
        name: weight.detach().contiguous().view(BITS[weight.element_size()]).flatten().cpu().numpy().copy()
        for name, weight in weights.items()
    }


def whole_copy(bits: Bits, version: int, fingerprint: str) -> dict[str, Any]:
    return _sealed({f"all:{name}": values for name, values in bits.items()}, version, -1, fingerprint)


def difference(new: Bits, old: Bits, version: int, base: int, fingerprint: str) -> dict[str, Any] | None:
    """None if it is not much smaller than the whole."""
    budget = SMALL * sum(values.nbytes for values in new.values())
    parts: dict[str, Any] = {}
    for name, values in new.items():
        places = np.flatnonzero(values != old[name])
        if len(places):
            places = places.astype(np.int32 if len(values) < 2**31 else np.int64)
            parts |= {f"at:{name}": places, f"to:{name}": values[places]}
            budget -= places.nbytes + parts[f"to:{name}"].nbytes
            if budget < 0:
                return None
    return _sealed(parts, version, base, fingerprint)


def _sealed(parts: dict[str, Any], version: int, base: int, fingerprint: str) -> dict[str, Any]:
    header = json.dumps({"names": sorted(parts), "fingerprint": fingerprint}).encode("ascii")
    sealed = {**parts, "header": header, "version": version, "base": base}
    return {**sealed, "checksum": _checksum(sealed)}


def _checksum(parts: Mapping[str, Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        value = parts[name]
        digest.update(name.encode())
        digest.update(value if isinstance(value, bytes) else np.ascontiguousarray(value).data)
    return digest.digest()


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
    for name in names:
        flat = torch.empty_like(weights[name], device="cpu", memory_format=torch.contiguous_format)
        bits = flat.view(BITS[flat.element_size()]).view(-1)
        if base == -1:
            bits.copy_(torch.from_numpy(np.array(parts[f"all:{name}"])))
        else:
            flat.copy_(weights[name])
            places = torch.from_numpy(np.array(parts[f"at:{name}"], dtype=np.int64))
            bits[places] = torch.from_numpy(np.array(parts[f"to:{name}"]))
        weights[name].copy_(flat)
    return version, str(header["fingerprint"])


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
