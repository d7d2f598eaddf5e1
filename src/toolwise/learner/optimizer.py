"""The optimiser: accumulates gradients in fp32, clips them, skips bad steps, and updates weights of any precision.

Half precision loses small updates, so there AdamW works on fp32 master copies and the weights are rounded from them.
`actor.optimizer_state` says where AdamW's state lives. Per trained parameter, beside the weight and its gradient:

    "fp32"   moments 8 bytes, master 4 if the weight is half precision
    "bf16"   moments 4 bytes, rounded to bf16 after each step (`bf16_adamw`); the master as above
    "cpu"    nothing on the GPU: moments and master are in CPU memory (12 bytes), which computes the step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolwise.config.router import RouterConfig
from toolwise.config.schema import ActorConfig, CriticConfig, OptimizerState
from toolwise.config.sft import SftConfig
from toolwise.learner import distributed
from toolwise.learner.bf16_adamw import Bf16AdamW
from toolwise.learner.schedules import lr_factor
from toolwise.learner.sharding import like_sharded, local
from toolwise.learner.step_guard import Guard

CHUNK = {False: 1 << 18, True: 1 << 26}
"""Values processed at a time; keyed by whether the tensor is on a GPU."""


BETAS = (0.9, 0.95)


class Optimizer:
    """AdamW over the trainable ones of `weights`.

    `total_steps` are the updates after which a decaying rate reaches its minimum; `min_lr_ratio` and `spike_factor` are
    as in `[actor]`.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        config: ActorConfig | CriticConfig | RouterConfig | SftConfig,
        *,
        total_steps: int,
        min_lr_ratio: float = 0.0,
        spike_factor: float = 0.0,
        owner: str = "actor",
        state: OptimizerState = "fp32",
    ) -> None:
        self.config = config
        self.total_steps, self.min_lr_ratio = total_steps, min_lr_ratio
        self.guard = Guard(spike_factor, floor=config.max_grad_norm, owner=owner)
        self.weights = [weight for weight in weights if weight.requires_grad]
        self.offloaded, self.moment_bytes = state == "cpu", 2 if state == "bf16" else 4
        self.masters = [_master(weight, offload=self.offloaded) for weight in self.weights]
        self.holders = [_holder(w, m) for w, m in zip(self.weights, self.masters, strict=True)]
        """Tensors on the weights' device whose `.grad` adds up the gradients, in fp32."""
        self._host_gradients: list[Tensor] = []
        self.reserve: Callable[[Callable[[], None]], None] = lambda allocate: allocate()
        """Calls a function that allocates memory, and makes room if there is too little: `MicroBatchLimit.reserve`."""
        settings: dict[str, Any] = {"lr": config.lr, "betas": BETAS, "weight_decay": config.weight_decay}
        self.adamw: torch.optim.Optimizer = (
            Bf16AdamW(self.masters, **settings)
            if state == "bf16"
            else torch.optim.AdamW(self.masters, **settings, fused=True)
        )

    def accumulate_gradients(self) -> None:
        """Add the gradients of half-precision weights to their sums in fp32. fp32 weights accumulate their own."""
        pairs = zip(self.weights, self.holders, strict=True)
        changed = [(weight, holder) for weight, holder in pairs if weight is not holder and weight.grad is not None]
        sums, new = [], []
        for weight, holder in changed:
            assert weight.grad is not None
            if holder.grad is None:
                holder.grad = weight.grad.float()
            else:
                sums.append(holder.grad)
                new.append(weight.grad)
            weight.grad = None
        if sums:
            torch._foreach_add_(sums, new)

    def _allocate_state(self) -> None:
        """Allocate the moments that the next step needs, so that it cannot run out of memory half way."""
        for master, holder in zip(self.masters, self.holders, strict=True):
            if holder.grad is not None and master not in self.adamw.state:
                dtype = torch.bfloat16 if self.moment_bytes == 2 else master.dtype
                self.adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master, dtype=dtype),
                    "exp_avg_sq": torch.zeros_like(master, dtype=dtype),
                }

    @torch.no_grad()
    def step(self, update: int, suspects: Callable[[], Sequence[str]] = list) -> dict[str, float]:
        """Take a step unless the guard rejects it, and clear the gradients. Return the gradient and update norms."""
        distributed.sum_gradients(self.holders)
        norm = distributed.clip_gradients(self.holders, self.config.max_grad_norm)
        update_norm = 0.0
        if self.guard.admits(norm, suspects):
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate(update)
            if self.offloaded:
                self._move_gradients()
            self.reserve(self._allocate_state)
            self.adamw.step()
            update_norm = self._update_norm()
            if pairs := list(self._master_pairs()):
                torch._foreach_copy_([local(weight) for weight, _ in pairs], [local(master) for _, master in pairs])
        self.zero_grad()
        return {"grad_norm": norm, "update_norm": update_norm}

    def zero_grad(self) -> None:
        for tensor in (*self.masters, *self.holders, *self.weights):
            tensor.grad = None

    def _move_gradients(self) -> None:
        """Copy the gradients to the masters on the CPU, through memory that is reused."""
        if not self._host_gradients:
            pinned = self.weights[0].is_cuda if self.weights else False
            self._host_gradients = [torch.empty(m.shape, dtype=m.dtype, pin_memory=pinned) for m in self.masters]
        for master, holder, buffer in zip(self.masters, self.holders, self._host_gradients, strict=True):
            if holder.grad is not None:
                master.grad = buffer.copy_(local(holder.grad), non_blocking=True)
        if self.weights and self.weights[0].is_cuda:
            torch.cuda.synchronize(self.weights[0].device)

    def learning_rate(self, update: int) -> float:
        return self.config.lr * lr_factor(
            update,
            schedule=self.config.lr_schedule,
            warmup_steps=self.config.warmup_steps,
            total_steps=self.total_steps,
            floor=self.min_lr_ratio,
        )

    def _update_norm(self) -> float:
        """Norm of the update just made, from AdamW's moments: keeping the old weights would cost a copy."""
        [group] = self.adamw.param_groups
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        decay_ratio = lr * decay / (1.0 - lr * decay)  # relative to the weights after the step
        squared_norm = torch.zeros((), dtype=torch.float64, device=self.masters[0].device)
        for count, weights, means, squares in self._stepped_chunks():
            bias_correction2 = (1.0 - beta2**count) ** 0.5
            scale = lr * bias_correction2 / (1.0 - beta1**count)
            roots = torch._foreach_sqrt([square.float() for square in squares])
            torch._foreach_add_(roots, group["eps"] * bias_correction2)
            deltas = torch._foreach_div([mean.float() for mean in means], roots)
            torch._foreach_mul_(deltas, scale * (1.0 + decay_ratio))
            if decay_ratio:
                torch._foreach_add_(deltas, weights, alpha=decay_ratio)
            squares_of = torch.stack([torch.dot(delta, delta) for delta in deltas]).double().sum()
            squared_norm += squares_of.to(squared_norm.device)
        if any(local(weight) is not weight for weight in self.weights):
            [total] = distributed.sum_over_ranks([float(squared_norm)], squared_norm.device)
            return math.sqrt(total)
        return math.sqrt(float(squared_norm))

    def _stepped_chunks(self) -> Iterator[tuple[float, list[Tensor], list[Tensor], list[Tensor]]]:
        """Step count, masters and moments of what was just updated, about `CHUNK` values at a time: on a CPU so that
        temporaries stay in the cache, on a GPU so that they stay small."""
        stepped = [(m, state) for m in self.masters if m.grad is not None and (state := self.adamw.state.get(m))]
        # One transfer for all of them: each would wait for the GPU.
        steps = [state["step"] for _, state in stepped]  # of sharded weights in CPU memory, and of a head on the GPU
        counts = torch.stack([step.to(steps[0].device) for step in steps]).tolist() if steps else []
        chunks: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        size, before = 0, 0.0
        for (master, state), count in zip(stepped, counts, strict=True):
            limit = CHUNK[master.is_cuda]
            tensors = (local(x).reshape(-1) for x in (master, state["exp_avg"], state["exp_avg_sq"]))
            flat = ((x,) if x.numel() <= limit else torch.split(x, limit) for x in tensors)
            for parts in zip(*flat, strict=True):
                elsewhere = chunks[0] and chunks[0][0].device != parts[0].device
                if chunks[0] and (size + parts[0].numel() > limit or count != before or elsewhere):
                    yield before, *chunks
                    chunks, size = ([], [], []), 0
                for chunk, part in zip(chunks, parts, strict=True):
                    chunk.append(part)
                size, before = size + parts[0].numel(), count
        if chunks[0]:
            yield before, *chunks

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Update the masters after loading weights. A master that still rounds to its weight is kept: it is more
        precise."""
        for weight, master in self._master_pairs():
            current, kept = local(weight.detach()).to(master.device), local(master)
            kept.copy_(torch.where(kept.to(weight.dtype) == current, kept, current.float()))

    def _master_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((w, m) for w, m in zip(self.weights, self.masters, strict=True) if w is not m)

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self.adamw.state_dict(),
            "guard": self.guard.state_dict(),
            "masters": self._half_precision_masters(),
        }

    def _half_precision_masters(self) -> list[Tensor]:
        """The masters that say more than their weights."""
        return [master for weight, master in self._master_pairs() if weight.dtype != master.dtype]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.guard.load_state_dict(state["guard"])
        for master, saved in zip(self._half_precision_masters(), state["masters"], strict=True):
            master.copy_(saved)


def _master(weight: Tensor, *, offload: bool) -> Tensor:
    """What AdamW updates in place of `weight`: an fp32 copy, or the weight itself if it can be updated as it is. In CPU
    memory each process has a plain copy of its part."""
    if offload:
        return local(weight.detach()).to("cpu", torch.float32, copy=True)
    return weight if torch.finfo(weight.dtype).bits >= 32 else weight.detach().float()


def _holder(weight: Tensor, master: Tensor) -> Tensor:
    if weight.dtype == master.dtype:
        return weight
    if master.device == weight.device and isinstance(weight, DTensor) == isinstance(master, DTensor):
        return master
    # A gradient must have the shape and type of its tensor; this one takes the memory of a single number.
    empty = torch.zeros((), device=weight.device).expand(local(weight).shape)
    return like_sharded(empty, weight)
