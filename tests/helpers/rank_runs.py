"""Runs the jobs of learner_ranks.py in processes, and compares what they learned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import learner_ranks
import torch
from safetensors.torch import load_file


def run_ranks(ranks: int, folder: Path, job: str) -> list[dict[str, torch.Tensor]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, learner_ranks.__file__, str(ranks), str(folder), job]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(ranks)]


def largest_gap(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    gaps = [float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected]
    assert all(gap == gap for gap in gaps)
    return max(gaps)
