"""A thousand steps in a world where two of a hundred tool calls, rewards and environments fail: nothing may grow.

The run is a process of its own, looked at from outside: its memory, descriptors and threads, its processes, and what
lies in its temporary folder. `SOAK_STEPS` sets another length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import pytest

from toolwise.training.rollout_paths import rollout_files
from toolwise.training.trackers.jsonl import read_metrics

STEPS = int(os.environ.get("SOAK_STEPS", "1000"))
WORLD = '''
"""Two in a hundred fail, each in one of the ways that people's code does."""
import asyncio
import os
import random
import time

from toolwise import reward_function, tool
from toolwise.demo.reward import small_world_reward
from toolwise.envs.tool_env import ToolEnv
from toolwise.tools.builtin.calculator import evaluate

CHANCE = 0.02


def fail(*ways):
    if random.SystemRandom().random() < CHANCE:
        random.SystemRandom().choice(ways)()


def raises():
    raise ValueError("planted")


def dies():
    os._exit(7)


def hangs():
    time.sleep(60)


def swells():
    held = bytearray(1 << 40)


@tool(isolate=True)
def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: Such as 12 * 3.
    """
    fail(raises, raises, dies, hangs)
    return str(evaluate(expression))


@reward_function
def grade(messages, ground_truth):
    fail(raises, raises, dies, hangs, swells)
    return small_world_reward(messages, ground_truth)


class World(ToolEnv):
    async def step(self, action):
        fail(raises)
        return await super().step(action)

    async def reset(self):
        fail(raises)
        return await super().reset()

    async def close(self):
        await super().close()
        fail(raises)
'''


@dataclass(frozen=True)
class Sample:
    """The state of the run after a step, its helper processes included."""

    step: int
    rss_mb: float
    descriptors: int
    threads: int
    processes: int
    processes_mb: float
    temporary_files: int
    checkpoints_mb: float


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        children = [int(c) for t in Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in children for one in tree_of(child))]


def rss_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def folder_mb(folder: Path) -> float:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.lstat().st_size)
        except OSError:
            continue
    return sum(sizes) / 2**20


def sample(pid: int, step: int, run: Path, temporary: Path) -> Sample:
    helpers = tree_of(pid)[1:]
    return Sample(
        step,
        rss_mb(pid),
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
        len(helpers),
        sum(map(rss_mb, helpers)),
        sum(1 for _ in temporary.rglob("*")),
        folder_mb(run / "checkpoints"),
    )


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_grows_in_a_thousand_steps(tmp_path: Path, make_config: Callable[..., Path]) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    config = make_config(
        tmp_path,
        {
            "deterministic": False,
            "tools": ["world.py:calculator", "search"],
            "env": {"name": "world.py:World"},
            "reward": {"function": "world.py:grade", "sandbox": {"timeout_s": 2.0}, "max_error_rate": 1.0},
            "rollout": {"n": 4, "max_new_tokens": 24, "temperature": 1.5},
            "multi_turn": {"max_turns": 2, "tool_timeout_s": 2.0},
            "trainer": {"total_steps": STEPS, "save_every": max(1, STEPS // 40), "console": False},
            "validation": {"before": False},
        },
    )
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "toolwise", "train", str(config), "--out", str(run)],
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    samples: list[Sample] = []
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(1.0)
        if metrics.exists() and (lines := metrics.read_text().splitlines()):
            try:
                samples.append(sample(process.pid, json.loads(lines[-1])["step"], run, temporary))
            except (OSError, json.JSONDecodeError):
                continue
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read()[-2000:]
    (tmp_path / "samples.json").write_text(json.dumps([astuple(s) for s in samples]))
    left = [path for path in temporary.rglob("*") if not path.name.startswith("torchinductor")]
    assert left == []  # nothing outlives the run
    rows = [row for file in rollout_files(run / "rollouts", "*").values() for row in read_metrics(file)]
    assert len(rows) >= STEPS * 8
    faults = sum(row["fault"] is not None or row["error"] is not None for row in rows)
    assert 0.01 < faults / len(rows) < 0.2, faults  # two in a hundred at each of a few places
    early = [s for s in samples if STEPS // 10 <= s.step < STEPS * 3 // 10]
    late = [s for s in samples if s.step >= STEPS * 8 // 10]
    # Tool workers come and go with the calls under way, eight at most: each has a supervisor and takes four descriptors
    # and at most one thread of the trainer.
    assert max(s.processes for s in samples) <= 2 * 8 + 8
    figures: dict[str, tuple[Callable[[Sample], float], float]] = {
        "memory in MB": (lambda s: s.rss_mb, 30.0),
        "descriptors beside those of workers": (lambda s: s.descriptors - 2 * s.processes, 4.0),
        "threads beside those of workers": (lambda s: s.threads - s.processes / 2, 2.0),
        "MB of a worker": (lambda s: s.processes_mb / max(1, s.processes), 10.0),
        "temporary files": (lambda s: s.temporary_files, 20.0),
        "MB of checkpoints": (lambda s: s.checkpoints_mb, 1.0),
    }
    for name, (figure, at_most) in figures.items():
        before, after = (median(map(figure, part)) for part in (early, late))
        print(f"{name}: {before:g} -> {after:g}")
        assert after <= before + at_most, name
