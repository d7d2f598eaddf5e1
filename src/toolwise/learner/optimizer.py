"""The optimiser: accumulates gradients in fp32, clips them, skips bad steps, and updates weights of any precision.

Half precision loses small updates, so there AdamW works on fp32 master copies and the weights are rounded from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from toolwise.config.router import RouterConfig
from toolwise.config.schema import ActorConfig, CriticConfig
from toolwise.config.sft import SftConfig
from toolwise.learner import distributed
from toolwise.learner.schedules import lr_factor
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
    ) -> None:
        self.config = config
        self.total_steps, self.min_lr_ratio = total_steps, min_lr_ratio
        self.guard = Guard(spike_factor, floor=config.max_grad_norm, owner=owner)
        self.weights = [weight for weight in weights if weight.requires_grad]
        self.masters = [w if torch.finfo(w.dtype).bits >= 32 else w.detach().float() for w in self.weights]
        self.adamw = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay, fused=True
        )

    def accumulate_gradients(self) -> None:
        """Move the gradients of half-precision weights to their fp32 masters, adding them up there. fp32 weights
        accumulate their own."""
        for weight, master in self._master_pairs():
            if weight.grad is not None:
                grad = weight.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
                weight.grad = None

    @torch.no_grad()
    def step(self, update: int, suspects: Callable[[], Sequence[str]] = list) -> dict[str, float]:
        """Take a step unless the guard rejects it, and clear the gradients. Return the gradient and update norms."""
        distributed.sum_gradients(self.masters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.config.max_grad_norm))
        update_norm = 0.0
        if self.guard.admits(norm, suspects):
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate(update)
            self.adamw.step()
            update_norm = self._update_norm()
            for weight, master in self._master_pairs():
                weight.copy_(master)
        self.zero_grad()
        return {"grad_norm": norm, "update_norm": update_norm}

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        for weight, _ in self._master_pairs():
            weight.grad = None

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
        for master in self.masters:
            state = self.adamw.state.get(master)
            if master.grad is None or not state:
                continue
            count = float(state["step"])
            bias_correction2 = (1.0 - beta2**count) ** 0.5
            scale = lr * bias_correction2 / (1.0 - beta1**count)
            flat = (master.reshape(-1), state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1))
            # In pieces, so that temporaries stay in the cache.
            for weight, mean, square in zip(*(x.split(CHUNK[x.is_cuda]) for x in flat), strict=True):
                delta = (mean / square.sqrt().add_(group["eps"] * bias_correction2)).mul_(scale * (1.0 + decay_ratio))
                if decay_ratio:
                    delta.add_(weight, alpha=decay_ratio)
                squared_norm += torch.dot(delta, delta)
        return math.sqrt(float(squared_norm))

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Update the masters after loading weights. A master that still rounds to its weight is kept: it is more
        precise."""
        for weight, master in self._master_pairs():
            master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.detach().float()))

    def _master_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((w, m) for w, m in zip(self.weights, self.masters, strict=True) if w is not m)

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self.adamw.state_dict(),
            "guard": self.guard.state_dict(),
            "masters": [master for _, master in self._master_pairs()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.guard.load_state_dict(state["guard"])
        for (_, master), saved in zip(self._master_pairs(), state["masters"], strict=True):
            master.copy_(saved)
