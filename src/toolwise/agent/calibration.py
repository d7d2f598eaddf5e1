"""Thresholds that let a router meet budgets it was not trained for; fitted on validation rows, stored with its head."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from toolwise.errors import CheckpointError, ConfigError
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.threshold import Floats, Threshold
from toolwise.serialization.json_text import json_text
from toolwise.training import checkpoint
from toolwise.training.checkpoint.amendment import amend

_KEY = "calibration"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Thresholds for a list of budgets; a budget between two of them mixes both at random."""

    budgets: tuple[float, ...]
    """Increasing."""
    thresholds: tuple[Threshold, ...]
    route_costs: tuple[float, ...]
    """Mean cost of each route on the validation rows; used if the head does not predict costs."""
    unit: str = "cost"
    rows: int = 0
    """Number of validation rows it was fitted on."""
    direct_s: float | None = None
    """Mean seconds per prompt that is answered directly, one at a time."""
    with_tools_s: float | None = None
    """Mean seconds for the same prompts with all their tools."""

    def threshold_for(self, budget: float, chance: float) -> Threshold:
        """`chance`, uniform in [0, 1), picks one of the two neighbouring thresholds for a budget between them."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            raise ConfigError(
                f"budget {budget:g} is outside {self.budgets[0]:g} to {self.budgets[-1]:g}, which the checkpoint is "
                "calibrated for: choose a budget within it, or calibrate again with toolwise eval --budgets"
            )
        above = bisect_left(self.budgets, budget)
        if self.budgets[above] == budget:
            return self.thresholds[above]
        low, high = self.budgets[above - 1], self.budgets[above]
        return self.thresholds[above if chance < (budget - low) / (high - low) else above - 1]

    def route(self, values: Floats, costs: Floats | None, budget: float, chances: tuple[float, float]) -> int:
        """The route of one prompt from the head's values and predicted costs, [routes] each."""
        expected = np.asarray(self.route_costs) if costs is None else costs
        return self.threshold_for(budget, chances[0]).route(values, expected, chances[1])


def calibration_of(metadata: Mapping[str, Any]) -> Calibration | None:
    """The calibration stored in a head's metadata; None if it was never calibrated."""
    if _KEY not in metadata:
        return None
    try:
        return TypeAdapter(Calibration).validate_python(metadata[_KEY])
    except ValidationError as fault:
        raise CheckpointError(
            f"{ROUTER_METADATA_FILE} holds a calibration that cannot be read ({fault.errors()[0]['msg']}): calibrate "
            "again with toolwise eval --budgets"
        ) from None


def store_calibration(model: Path, calibration: Calibration) -> None:
    """Adds the calibration to the head's metadata in `model`, a checkpoint (whose manifest is updated) or an export."""
    path = model / ROUTER_METADATA_FILE
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path} cannot be read ({fault}): is there a router in {model}?") from None
    data = (json_text(metadata | {_KEY: asdict(calibration)}, indent=2) + "\n").encode()
    if (model.parent / checkpoint.MANIFEST).is_file():
        amend(model.parent, {f"{model.name}/{ROUTER_METADATA_FILE}": data})
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
