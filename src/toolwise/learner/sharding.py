"""A model whose weights, gradients and optimiser state are divided among the learners, by FSDP2 (`fully_shard`).

Each layer is a group of its own, gathered when it runs; embeddings, last norm and head, which may be tied, are one
more. Adapters (LoRA), which are small, stay whole in each process. Gradients are summed, not averaged: losses are
divided by counts over all processes already. A pass is collective, so all processes run as many: one with fewer
micro-batches runs fillers, which add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from toolwise.errors import ConfigError
from toolwise.models.attention_layers import adopt_reports, attention_layers, head_problem
from toolwise.models.merged_weights import is_adapter_weight, merge_in_passes

T = TypeVar("T")
ENTRY = "toolwise_pass"
"""The method of a sharded model that every pass goes through: it gathers what all layers need, and hooks the backward
pass."""


def shard_model(model: Any, *, offload: bool = False) -> None:
    """Divide the model's weights, in place. All processes must have the same. `offload`: each process keeps its part,
    with gradients, in CPU memory, and has a layer on its device only while that layer runs."""
    report = attention_layers(model)  # runs the model, which needs whole weights
    if report.problem is not None:
        raise ConfigError(f'cluster.sharding = "fsdp" needs attention that can be packed, and {report.problem}')
    head_problem(model)
    merge_in_passes(model)
    adapters = {weight for name, weight in model.named_parameters() if is_adapter_weight(name)}
    trunk, first = model.get_decoder(), next(model.parameters())
    mesh = init_device_mesh(first.device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.promote_types(first.dtype, torch.float32)),
        "offload_policy": CPUOffloadPolicy(pin_memory=first.is_cuda) if offload else OffloadPolicy(),
        "ignored_params": adapters,
    }
    for layer in trunk.layers:
        fully_shard(layer, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else the factor needs a reduction that only NCCL has
    adopt_reports(model, first)

    def run(work: Callable[[], T]) -> T:
        adopt_reports(model, first)  # the gathered weights are other objects
        return work()

    setattr(model, ENTRY, run)
    register_fsdp_forward_method(model, ENTRY)


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def compute_device(model: Any) -> torch.device:
    """Where the model runs; its weights may be kept in CPU memory."""
    first = next(model.parameters())
    if isinstance(first, DTensor) and first.device.type != first.device_mesh.device_type:
        return torch.device(first.device_mesh.device_type, torch.cuda.current_device())
    device: torch.device = first.device
    return device


def run_pass(model: Any, work: Callable[[], T]) -> T:
    """Run a forward pass of the model."""
    result: T = getattr(model, ENTRY)(work) if is_sharded(model) else work()
    return result


def gathered(weight: Tensor) -> Tensor:
    """The whole tensor; a collective if it is divided."""
    whole: Tensor = weight.full_tensor().detach() if isinstance(weight, DTensor) else weight
    return whole


@torch.no_grad()
def write_whole(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write whole weights into the model's parameters of these names; each process keeps its part of them."""
    parameters = dict(model.named_parameters())
    for name, given in weights.items():
        weight, new = parameters[name], given.to(parameters[name].device)
        if isinstance(weight, DTensor):
            weight.copy_(distribute_tensor(new, weight.device_mesh, weight.placements, src_data_rank=None))
        else:
            weight.copy_(new)


def local(tensor: Tensor) -> Tensor:
    """This process' part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_sharded(part: Tensor, tensor: Tensor) -> Tensor:
    """This process' part as that of a tensor which is divided as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    whole: Tensor = DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return whole


def local_range(tensor: Tensor) -> tuple[int, int] | None:
    """The range of the flattened tensor that this process has; None if it has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    count = int(torch.Size(shape).numel())
    start = min(offset[0] * row, tensor.numel()) if count else tensor.numel()
    return start, start + count


def equal_passes(model: Any, parts: Iterator[T], filler: Callable[[], T]) -> Iterator[tuple[T, bool]]:
    """Each part of this process and False; then as many fillers and True as it has fewer parts than others."""
    from toolwise.learner.distributed import max_over_ranks

    if not is_sharded(model):
        yield from ((part, False) for part in parts)
        return
    own: Sequence[T] = list(parts)
    [most] = max_over_ranks([float(len(own))], next(model.parameters()).device)
    yield from ((part, False) for part in own)
    yield from ((filler(), True) for _ in range(int(most) - len(own)))
