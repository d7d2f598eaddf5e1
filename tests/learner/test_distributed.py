"""Two processes over gloo learn the same as one process with all the rollouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gloo_worker
import pytest
import torch
from safetensors.torch import load_file

from toolwise.learner import distributed

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, gloo_worker.__file__, "2", str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.parametrize("case", [case for case in gloo_worker.CASES if case != "many"])
def test_gradients_and_metrics_equal_those_of_one_process(learned: Path, case: str) -> None:
    expected, metrics = gloo_worker.learn(case, 0, 1)
    for rank in (0, 1):
        found = load_file(learned / f"{case}-{rank}.safetensors")
        for who in ("actor", "critic"):
            gap = (found[f"{who}.gradient"] - expected[f"{who}.gradient"]).norm()
            assert float(gap / expected[f"{who}.gradient"].norm()) < 1e-5
        told = json.loads((learned / f"{case}-{rank}.json").read_text())
        assert told.keys() == metrics.keys()
        for name in told.keys() - {"actor/computed_tokens", "canary/logprob_gap_mean", "canary/logprob_gap_max"}:
            assert told[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("case", gloo_worker.CASES)
def test_all_processes_hold_the_same_weights_afterwards(learned: Path, case: str) -> None:
    first, second = (load_file(learned / f"{case}-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_processes_take_the_same_number_of_steps(learned: Path) -> None:
    told = [json.loads((learned / f"many-{rank}.json").read_text()) for rank in (0, 1)]
    assert [metrics["actor/updates"] for metrics in told] == [3.0, 3.0]


def test_a_single_process_sums_nothing() -> None:
    assert not distributed.is_distributed()
    assert distributed.sum_over_ranks([1.0, 2.0]) == distributed.max_over_ranks([1.0, 2.0]) == [1.0, 2.0]
    weight = torch.nn.Parameter(torch.zeros(2))
    distributed.sum_gradients([weight])
    assert weight.grad is None
