"""The router's head: from what the trunk makes of a prompt to a figure for each route, in fp32 whatever the trunk is.

`policy` gives logits, one a route. `value` foresees the reward and each cost of each route, from which any budget's
logits follow: (Q̂ − Σ λ·ĉ) / temperature.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from toolwise.errors import CheckpointError
from toolwise.serialization.json_text import json_text

ROUTER_WEIGHTS_FILE, ROUTER_METADATA_FILE = "router.safetensors", "router.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What a head is; saved beside its weights."""

    width: int
    """Of the trunk's states, all the layers taken together."""
    routes: tuple[str, ...]
    mode: Literal["policy", "value"] = "policy"
    hidden: int = 0
    """Width of the layer between; 0: linear."""
    pool: Literal["last", "mean"] = "last"
    """What stands for a prompt: the state of its last token, or the mean of all."""
    layers: tuple[int, ...] = (-1,)
    """Which layers' states, side by side: -1 is the last one, after the trunk's own norm."""
    units: tuple[str, ...] = ("cost",)
    """value: what is foreseen beside the reward."""
    temperature: float = 0.05
    """value: how sharply the better route is preferred where routes are drawn."""
    seed: int = 0


class RouterHead(nn.Module):
    """A layer norm, a hidden layer where one is asked for, and a linear map that begins at zero: all routes alike."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings
        outputs = len(settings.routes) * (1 if settings.mode == "policy" else 1 + len(settings.units))
        with torch.random.fork_rng(devices=[]):  # its own seed, and nobody else's draws change
            torch.manual_seed(settings.seed)
            self.norm = nn.LayerNorm(settings.width, dtype=torch.float32)
            self.hidden = nn.Linear(settings.width, settings.hidden, dtype=torch.float32) if settings.hidden else None
            self.out = nn.Linear(settings.hidden or settings.width, outputs, dtype=torch.float32)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[batch, width] -> [batch, routes], or [batch, routes, 1 + units] in the value mode."""
        with torch.autocast(features.device.type, enabled=False):
            # Casts to the head's own precision: fp32, but a test may ask for more.
            x = self.norm(features.to(self.out.weight.dtype))
            if self.hidden is not None:
                x = nn.functional.gelu(self.hidden(x))
            found: Tensor = self.out(x)
        return found if self.settings.mode == "policy" else found.view(*found.shape[:-1], len(self.settings.routes), -1)

    def logits(self, found: Tensor, multipliers: Sequence[float] = ()) -> Tensor:
        """[batch, routes] from what `forward` gave; the multipliers are those of `units`, in their order."""
        if self.settings.mode == "policy":
            return found
        weights = found.new_tensor(list(multipliers))
        return (found[..., 0] - (found[..., 1:] * weights).sum(-1)) / self.settings.temperature


def save_head(head: RouterHead, folder: Path, metadata: dict[str, Any] | None = None) -> None:
    """Two files beside a model's weights that plain `transformers` does not look at."""
    from safetensors.torch import save_file

    save_file(
        {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()},
        folder / ROUTER_WEIGHTS_FILE,
    )
    told = {"format": FORMAT, "head": asdict(head.settings)} | (metadata or {})
    (folder / ROUTER_METADATA_FILE).write_text(json_text(told, indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path) -> tuple[RouterHead, dict[str, Any]]:
    """The head that `save_head` wrote to `folder`, and all that was told beside it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        told = json.loads((folder / ROUTER_METADATA_FILE).read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / ROUTER_METADATA_FILE} is of format {told['format']}, this version reads {FORMAT}"
            )
        found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in told["head"].items()}
        head = RouterHead(HeadSettings(**found))
        head.load_state_dict(load_file(folder / ROUTER_WEIGHTS_FILE))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no router ({ROUTER_METADATA_FILE}, {ROUTER_WEIGHTS_FILE}): train one with router.enable=true"
        ) from None
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as fault:
        reason = str(fault).splitlines()[0]
        raise CheckpointError(f"the router in {folder} cannot be read ({reason}): copy the folder again") from fault
    return head.eval(), told
