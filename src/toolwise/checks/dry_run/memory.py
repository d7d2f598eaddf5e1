"""Memory of a run by component: computed from tensor shapes, or measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from toolwise.engine import Engine
from toolwise.learner.optimizer import Optimizer
from toolwise.training.run import Run

if TYPE_CHECKING:
    from toolwise.learner.actor import Actor

T = TypeVar("T")
FP32 = 4


def measure_peak(work: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Run `work`; return its result and its peak memory in bytes above the level before it, or None if unknown."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    resident = status_bytes("VmRSS:") if _reset_peak() else None
    result = work()
    peak = status_bytes("VmHWM:")
    return result, None if resident is None or peak is None else max(0, peak - resident)


def device_bytes(device: torch.device) -> int:
    """Total memory of the GPU, or of this machine for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def actor_of(run: Run) -> Actor:
    return cast("Actor", run.learner)  # a run has no other learner


def static_parts(run: Run) -> dict[str, int]:
    """Bytes of everything that lives as long as the run: weights, gradients, optimizer states and copies."""
    learner = actor_of(run)
    parts = {"weights": _size(learner.model.parameters())} | _training_parts(learner.optimizer)
    if learner.reference is not None and learner.adapters is None:  # adapters are turned off instead
        parts["reference model"] = parts["weights"]
    if learner.critic is not None:
        parts["critic"] = _size(learner.critic.model.parameters())
        parts["critic's training"] = sum(_training_parts(learner.critic.optimizer).values())
    return {name: size for name, size in parts.items() if size}


def _training_parts(optimizer: Optimizer) -> dict[str, int]:
    weights = sum(weight.numel() for weight in optimizer.masters)
    copies = sum(m.numel() for w, m in zip(optimizer.weights, optimizer.masters, strict=True) if w is not m)
    return {
        "gradients": FP32 * weights,
        "optimizer states": 2 * FP32 * weights,
        "fp32 master weights": FP32 * copies,
    }


def cache_bytes(run: Run) -> tuple[int, int] | None:
    """(bytes of the whole KV cache, bytes per token); None for an engine that manages its own cache."""
    engine = run.policy.engine
    if not isinstance(engine, Engine):
        return None
    block = engine.runner.block_bytes
    return engine.blocks.count * block, block // engine.blocks.size


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _reset_peak() -> bool:
    """Reset VmHWM, the peak resident size (Linux)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def status_bytes(field: str) -> int | None:
    """Memory of this process, such as "VmRSS:"; None if the system does not report it."""
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(field)), None)
    except OSError:
        return None
