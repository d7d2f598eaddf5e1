"""Runs on a Ray cluster of four nodes on this machine: the demo learns what it learns in one process, and a worker, a
learner and a node die in every run of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray_nodes

from toolwise.demo.recipe import BUDGET
from toolwise.training.records import read_records
from toolwise.training.rollout_paths import rollout_file

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'"),
]
SEEDS, KILL_RUNS, STEPS = 5, 10, 24


def call(*command: object) -> str:
    """In a process of its own: Ray reads its token once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False, timeout=7200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


RISES: dict[int, dict[str, float]] = {}
"""Of the share of correct answers, by seed: in one process, and on the cluster."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_demo_learns_on_four_nodes(seed: int, tmp_path: Path) -> None:
    """With 2 learners and 3 workers, what it learns in one process."""
    call("-m", "toolwise", "demo", "--seed", seed, "--out", tmp_path / "alone", "--no-frontier")
    call(ray_nodes.__file__, "demo", seed, tmp_path / "together")
    rises = {}
    for name in ("alone", "together"):
        found = summary(tmp_path / name)
        rises[name] = found["after"]["correct"] - found["before"]["correct"]
        spent, error = (found["after"][f"budget/cost/{part}"] for part in ("delivered", "stderr"))
        assert abs(spent - BUDGET) <= 3 * error + 0.05
    assert rises["together"] >= 0.25
    RISES[seed] = rises


def test_over_all_seeds_it_learns_as_much_as_in_one_process() -> None:
    """Both runs of a seed sample other tokens as soon as one number is rounded in another way, so they are compared as
    two samples: over five seeds, and with their spread."""
    if len(RISES) < SEEDS:
        pytest.skip("needs the five tests before it, in the same process")
    alone, together = (sum(rises[name] for rises in RISES.values()) / SEEDS for name in ("alone", "together"))
    assert abs(together - alone) <= 2 * (2 * 0.16 / (240 * SEEDS)) ** 0.5 + 0.02


@pytest.mark.parametrize("seed", range(KILL_RUNS))
def test_runs_end_well_whoever_dies(seed: int, make_config: Any, tmp_path: Path) -> None:
    changes = {"rollout": {"n": 4}, "trainer": {"total_steps": STEPS, "save_every": 1}, "validation": {"before": False}}
    config, out = make_config(tmp_path, changes), tmp_path / "run"
    killed = json.loads(call(ray_nodes.__file__, "kills", seed, config, out))
    check_invariants(out)
    assert len(killed) == len(ray_nodes.KILLS), "the run ended before it was hit three times: raise STEPS"


def check_invariants(out: Path) -> None:
    """Every step once, with every group of its batch whole and learned from once."""
    assert summary(out)["steps"] == STEPS
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/updates" in line] == list(range(1, STEPS + 1))
    rollouts = Counter[str]()
    for step in range(1, STEPS + 1):
        path = rollout_file(out / "rollouts", f"step-{step:06}")
        assert path is not None
        records = read_records(path)
        assert list(Counter(record.group_id for record in records).values()) == [4, 4]
        rollouts.update(record.rollout_id for record in records)
    assert set(rollouts.values()) == {1}
