"""AdamW with moments in bf16: half their memory, for fp32 weights or masters.

The moments are rounded to the nearest bf16 number and the step is computed from the rounded ones, so that a resumed
run continues exactly. With β = (0.9, 0.95) nearest rounding does not freeze a moment: it moves by a twentieth or more
of its distance to its target, and bf16 numbers lie at most a 128th apart. `tests/learner/test_optimizer.py` measures
what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

CHUNK = {False: 1 << 18, True: 1 << 26}
"""Values processed at a time, by whether they are on a GPU."""


class Bf16AdamW(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Tensor], *, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8
    ) -> None:
        super().__init__(list(params), {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    _update(weight, self.state[weight], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # casts the moments to the weights' type
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(torch.bfloat16)


def _update(weight: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    (beta1, beta2), lr = group["betas"], group["lr"]
    state["step"] += 1
    count = float(state["step"])
    step_size, correction = lr / (1.0 - beta1**count), (1.0 - beta2**count) ** 0.5
    assert weight.grad is not None
    flat = [x.view(-1) for x in (weight, weight.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"])]
    size = CHUNK[weight.is_cuda]
    for part, grad, mean, square in zip(*(torch.split(x, size) for x in flat), strict=True):
        mean.copy_(mean.float().lerp_(grad, 1.0 - beta1))
        square.copy_(square.float().mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2))
        part.mul_(1.0 - lr * group["weight_decay"])
        part.addcdiv_(mean.float(), square.float().sqrt_().div_(correction).add_(group["eps"]), value=-step_size)
