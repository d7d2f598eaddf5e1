"""Calibrations: stored with the head, read back, and mixed between budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.agent.calibration import Calibration, calibration_of, store_calibration
from toolwise.errors import CheckpointError, ConfigError
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.threshold import Threshold, find_threshold
from toolwise.training import checkpoint

RNG = np.random.default_rng(0)
VALUES = np.log(RNG.dirichlet([1, 1, 1], 500))
COSTS = np.tile([0.0, 1.0, 1.0], (500, 1))
BUDGETS = (0.2, 0.6)
KNOWN = Calibration(
    BUDGETS,
    tuple(find_threshold(VALUES, COSTS, COSTS, budget) for budget in BUDGETS),
    (0.0, 1.0, 1.0),
    rows=500,
    direct_s=0.1,
    with_tools_s=0.4,
)


def spent(budget: float) -> float:
    rng = np.random.default_rng(1)
    routes = [KNOWN.route(row, None, budget, (rng.random(), rng.random())) for row in VALUES]
    return float(np.mean([COSTS[0, route] for route in routes]))


@pytest.mark.parametrize("budget", [0.2, 0.3, 0.4, 0.5, 0.6])
def test_budgets_in_between_mix_both_neighbours(budget: float) -> None:
    assert abs(spent(budget) - budget) < 0.05


@pytest.mark.parametrize("budget", [0.1, 0.7])
def test_budgets_outside_are_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="calibrated for"):
        KNOWN.threshold_for(budget, 0.5)


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / ROUTER_METADATA_FILE).write_text(json.dumps({"format": 1, "head": {"width": 3}}))
    assert calibration_of(json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())) is None
    store_calibration(tmp_path, KNOWN)
    metadata = json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())
    assert calibration_of(metadata) == KNOWN
    assert metadata["head"] == {"width": 3}
    store_calibration(tmp_path, Calibration((0.5,), (Threshold(1.0, 1.0, 0.0),), (0.0, 1.0, 1.0)))
    assert calibration_of(json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())).budgets == (0.5,)  # type: ignore[union-attr]


def test_in_a_checkpoint_the_manifest_is_updated(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / ROUTER_METADATA_FILE).write_text("{}")
        (folder / "config.json").write_text("{}")

    saved = checkpoint.save(tmp_path / "checkpoints", 3, {"progress": {"step": 3}}, extra_files={"model": fill})
    store_calibration(saved.path / "model", KNOWN)
    again = checkpoint.load(saved.path)
    assert again.step == 3
    assert calibration_of(json.loads((again.path / "model" / ROUTER_METADATA_FILE).read_text())) == KNOWN
    assert (again.path / "model" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("told", [{"calibration": {}}, {"calibration": {"thresholds": [1]}}, {"calibration": 3}])
def test_a_damaged_calibration_is_reported(told: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="calibrate again"):
        calibration_of(told)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"router\.json"):
        store_calibration(tmp_path, KNOWN)
