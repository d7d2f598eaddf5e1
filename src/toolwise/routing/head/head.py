"""The router's head: maps the trunk's prompt features to one output per route, in fp32 whatever the trunk's dtype.

`policy` mode gives one logit per route. `value` mode predicts the reward and each cost of each route, which give the
logits for any λ: (Q̂ − Σ λ·ĉ) / temperature.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from toolwise.config.loader import Section
from toolwise.errors import CheckpointError
from toolwise.routing.head import ROUTER_METADATA_FILE, ROUTER_WEIGHTS_FILE
from toolwise.routing.samples import RoutePrediction
from toolwise.serialization.json_text import json_text

FORMAT = 1
MIN_DEVIATION = 0.1
"""Least standard deviation that `scale_inputs` assumes of a channel, as a share of the root mean square of all: one
that hardly varied in the first batch must not be blown up."""


class HeadSettings(Section):
    """The architecture of a head, saved with its weights: options of `[router]` by the same name, and what the model
    and the budgets add."""

    width: int
    """Width of the features: the trunk's hidden size × number of layers."""
    routes: tuple[str, ...]
    mode: Literal["policy", "value"] = "policy"
    hidden: int = 0
    pool: Literal["last", "mean"] = "last"
    layers: tuple[int, ...] = (-1,)
    units: tuple[str, ...] = ("cost",)
    """value mode: the costs that are predicted in addition to the reward."""
    temperature: float = 0.05
    seed: int = 0
    bins: int = 0
    """policy mode: number of budgets that the head knows, each with its own output weights; 0: one set for all."""


class RouterHead(nn.Module):
    """Layer norm, optional hidden layer, and a linear map initialized to zero, so that all routes start equal."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        outputs = len(settings.routes) * (1 if settings.mode == "policy" else 1 + len(settings.units))
        outputs *= settings.bins or 1
        with torch.random.fork_rng(devices=[]):  # seeded without changing the global RNG state
            torch.manual_seed(settings.seed)
            self.norm = nn.LayerNorm(settings.width, dtype=torch.float32)
            self.hidden = nn.Linear(settings.width, settings.hidden, dtype=torch.float32) if settings.hidden else None
            self.out = nn.Linear(settings.hidden or settings.width, outputs, dtype=torch.float32)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[batch, width] -> [batch, routes], [batch, bins, routes] or, in value mode, [batch, routes, 1 + units]."""
        device = features.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                outputs = self._outputs(features)
        else:  # to enter the context takes as long as the head
            outputs = self._outputs(features)
        if self.settings.bins:
            return outputs.view(*outputs.shape[:-1], self.settings.bins, len(self.settings.routes))
        return (
            outputs
            if self.settings.mode == "policy"
            else outputs.view(*outputs.shape[:-1], len(self.settings.routes), -1)
        )

    def _outputs(self, features: Tensor) -> Tensor:
        # The head's own dtype is fp32, except in tests that need more precision. Features may come from elsewhere.
        norm, hidden, out = self.norm, self.hidden, self.out
        x = layer_norm(features.to(out.weight), norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        if hidden is not None:
            x = gelu(linear(x, hidden.weight, hidden.bias))
        return linear(x, out.weight, out.bias)

    @torch.no_grad()
    def scale_inputs(self, features: Tensor) -> None:
        """Set the layer norm so that its outputs have mean 0 and standard deviation 1 over `features` [batch, width].

        The states of last tokens have most of their length in common, so that what tells prompts apart is a small part
        of the head's input and is learned late.
        """
        norm = self.norm
        x = layer_norm(features.to(norm.weight.dtype), norm.normalized_shape, eps=norm.eps)
        deviation, mean = torch.std_mean(x, dim=0, correction=0)
        typical = float(deviation.square().mean().sqrt())
        if typical < 1e-6:
            return  # all features are the same
        deviation = deviation.clamp_min(MIN_DEVIATION * typical)
        norm.weight.copy_(1.0 / deviation)
        norm.bias.copy_(-mean / deviation)

    def logits(self, outputs: Tensor, multipliers: Sequence[float] = ()) -> Tensor:
        """[batch, routes] from the output of `forward`; one multiplier (λ) per entry of `units`."""
        if self.settings.mode == "policy":
            return outputs
        weights = outputs.new_tensor(list(multipliers))
        return (outputs[..., 0] - (outputs[..., 1:] * weights).sum(-1)) / self.settings.temperature


@torch.no_grad()
def predict_routes(head: RouterHead, features: Tensor, multipliers: Sequence[float] = ()) -> list[RoutePrediction]:
    """The head's prediction for each row of `features` [batch, width]."""
    outputs = head(features)
    if head.settings.bins:
        return [RoutePrediction.for_bins(rows) for rows in outputs.tolist()]
    logits = head.logits(outputs, multipliers)
    rows = list(zip(logits.log_softmax(-1).tolist(), logits.tolist(), strict=True))
    if head.settings.mode == "policy":
        return [RoutePrediction(tuple(logprobs), logits=tuple(raw)) for logprobs, raw in rows]
    return [
        RoutePrediction(
            tuple(logprobs),
            rewards=tuple(route[0] for route in values),
            costs=tuple(tuple(route[1:]) for route in values),
            logits=tuple(raw),
        )
        for (logprobs, raw), values in zip(rows, outputs.tolist(), strict=True)
    ]


def save_head(head: RouterHead, folder: Path, metadata: dict[str, Any] | None = None) -> None:
    """Writes two files next to a model's weights; plain `transformers` ignores them."""
    from safetensors.torch import save_file

    save_file(
        {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()},
        folder / ROUTER_WEIGHTS_FILE,
    )
    record = {"format": FORMAT, "head": head.settings.model_dump()} | (metadata or {})
    (folder / ROUTER_METADATA_FILE).write_text(json_text(record, indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path) -> tuple[RouterHead, dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        record = json.loads((folder / ROUTER_METADATA_FILE).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / ROUTER_METADATA_FILE} has format {record['format']}, but this version reads {FORMAT}"
            )
        head = RouterHead(HeadSettings.model_validate(record["head"]))
        head.load_state_dict(load_file(folder / ROUTER_WEIGHTS_FILE))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no router ({ROUTER_METADATA_FILE}, {ROUTER_WEIGHTS_FILE}): train one with router.enable=true"
        ) from None
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as fault:
        reason = str(fault).splitlines()[0]
        raise CheckpointError(f"the router in {folder} cannot be read ({reason}): copy the folder again") from fault
    return head.eval(), record
