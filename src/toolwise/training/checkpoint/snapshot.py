"""A consistent copy of a run's state in CPU memory, made while the run goes on.

`freeze` copies everything but the tensors at once; `TensorCopies` copies those afterwards, in any thread, as long as
they do not change. Its memory is reused: a run holds one copy, however many checkpoints it writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolwise.kernels.streams import stream_for

SLAB_BYTES = 1 << 29
"""Memory is allocated in pieces of this size, or of one tensor: page-locked memory is rounded up to a power of two."""
ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A state in which each tensor is replaced by a `TensorRef` to one of `tensors`."""

    tree: Any
    tensors: list[Tensor]
    ready: tuple[tuple[torch.device, Any], ...] = ()
    """For each GPU an event after everything that it was computing when the state was frozen."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class TensorRef:
    index: int


def freeze(state: Any) -> FrozenState:
    """Copy the structure and all values of `state` except its tensors. Equal views of one memory count once."""
    tensors: list[Tensor] = []
    seen: dict[tuple[Any, ...], TensorRef] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensor = value.detach()
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if key not in seen or not tensor.numel():
                seen[key] = TensorRef(len(tensors))
                tensors.append(tensor)
            return seen[key]
        if isinstance(value, Mapping):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([walk(item) for item in value])
        return copy.deepcopy(value)

    tree = walk(state)
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = tuple((device, torch.cuda.current_stream(device).record_event()) for device in devices)
    return FrozenState(tree, tensors, events)


class TensorCopies:
    """Copies of tensors on the CPU, in memory that the next copies reuse. Page-locked for tensors on a GPU: the device
    then copies at full speed, beside other work."""

    def __init__(self) -> None:
        self._layout: list[tuple[Any, ...]] = []
        self._copies: list[Tensor] = []

    def missing_bytes(self, frozen: FrozenState) -> int:
        """Memory that `copy` would have to allocate."""
        return 0 if _layout(frozen) == self._layout else frozen.nbytes - sum(held.nbytes for held in self._copies)

    @torch.no_grad()
    def copy(self, frozen: FrozenState) -> Any:
        """The frozen state with copies of its tensors; they are valid until the next call."""
        if _layout(frozen) != self._layout:
            self._layout, self._copies = [], []  # free the old ones first
            self._layout, self._copies = _layout(frozen), _allocate(frozen.tensors)
        streams = {device: stream_for("checkpoint", device) for device, _ in frozen.ready}
        for device, event in frozen.ready:
            streams[device].wait_event(event)
        for source, target in zip(frozen.tensors, self._copies, strict=True):
            if source.is_cuda:
                with torch.cuda.stream(streams[source.device]):
                    target.copy_(source, non_blocking=True)
            else:
                target.copy_(source)
        for stream in streams.values():
            stream.synchronize()
        return _restore(frozen.tree, self._copies)


def _layout(frozen: FrozenState) -> list[tuple[Any, ...]]:
    return [(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in frozen.tensors]


def _allocate(tensors: list[Tensor]) -> list[Tensor]:
    copies = []
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    slab, offset = torch.empty(0, dtype=torch.uint8).numpy(), 0
    for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if offset + size > len(slab):
            length = max(size, min(SLAB_BYTES, sum(sizes[index:])))
            slab, offset = torch.empty(length, dtype=torch.uint8, pin_memory=tensor.is_cuda).numpy(), 0
        # Through numpy, so that each copy has a storage of its own: shared ones count as tied weights.
        flat = torch.from_numpy(slab[offset : offset + tensor.nbytes])
        copies.append(flat.view(tensor.dtype).view(tensor.shape))
        offset += size
    return copies


def _restore(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, TensorRef):
        return tensors[tree.index]
    if isinstance(tree, dict):
        return {key: _restore(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_restore(item, tensors) for item in tree])
    return tree
