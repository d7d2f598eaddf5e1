"""An asynchronous run that is killed at random moments and resumed each time: relative to the checkpoint it resumed
from, no group is lost, learned from twice or too old, and finished groups are not rolled out again."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from async_cases import async_run, by_length
from safetensors.torch import load_file

from toolwise.envs.base import BaseEnv
from toolwise.training import checkpoint
from toolwise.training.rollout_index import token_path
from toolwise.training.rollout_paths import rollout_files
from toolwise.training.stored_groups import unpack_group
from toolwise.training.token_records import read_tokens
from toolwise.training.trainer import Training

# seed, staleness, kills, steps
CASES = [(0, 2, 50, 240), (1, 1, 15, 80), (2, 4, 15, 80), (3, 0, 10, 60)]
FIXED_STEPS, FIXED_KILLS = 24, 8
SETTINGS: dict[str, Any] = {
    "algorithm": {"zero_std_groups": "keep"},
    "rollout": {"n": 2, "max_new_tokens": 8},
    "validation": {"before": False},
}


class SlowWorld(BaseEnv):
    """Two turns, whose answers take up to a fifth of a second."""

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self) -> str:
        return "Begin."

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        await asyncio.sleep(random.uniform(0.0, 0.2))
        self.turn += 1
        return "Go on.", None, self.turn == 2, {}


def live(out: Path, staleness: int, steps: int, fixed: bool = False) -> None:
    """One process, from the start or the last checkpoint to the end, unless it is killed."""
    trainer = {
        "mode": "async",
        "max_staleness": staleness,
        "total_steps": steps,
        "save_every": 1,
        "keep_best": False,
        "console": False,
    }
    run = async_run(staleness, by_length, world=SlowWorld, **{**SETTINGS, "trainer": trainer, "deterministic": fixed})
    asyncio.run(Training(run, out, resume=(out / "config.toml").exists()).run_training())


def logprobs(path: Path) -> dict[str, bytes]:
    """Rollout -> the log-probs of all its tokens, from the files of one step."""
    found: dict[str, bytes] = {}
    for step in read_tokens(token_path(path)):
        found[step.rollout_id] = found.get(step.rollout_id, b"") + array("f", step.logprobs).tobytes()
    return found


class Witness:
    """What checkpoints vouched for."""

    def __init__(self, out: Path) -> None:
        self.out, self.learned, self.stored, self.step = out, dict[str, bytes](), dict[str, bytes](), -1

    def look(self) -> None:
        """After a kill: what the last checkpoint says was learned stays; what it stores must be learned as it is."""
        saved = checkpoint.latest(self.out / "checkpoints")
        if saved is None:
            return
        assert saved.step >= self.step
        now = self.record(saved.step)
        assert {name: now.get(name) for name in self.learned} == self.learned
        self.learned, self.step = now, saved.step
        self.stored |= self.groups_in(saved)

    def record(self, last: int) -> dict[str, bytes]:
        paths = rollout_files(self.out / "rollouts", "step-*")
        found = [logprobs(path) for name, path in paths.items() if int(name.partition("-")[2]) <= last]
        counts = Counter(rollout for step in found for rollout in step)
        assert set(counts.values()) <= {1}, "learned from twice"
        return {rollout: data for step in found for rollout, data in step.items()}

    def groups_in(self, saved: Any) -> dict[str, bytes]:
        groups = [
            unpack_group(packed, {}) for batch in saved.part("tickets")["open"] for _, packed in batch["finished"]
        ]
        return {
            rollout.rollout_id: b"".join(array("f", step.tokens.logprobs).tobytes() for step in rollout.steps)
            for group in groups
            for rollout in group.rollouts
        }


def started(out: Path, *arguments: Any) -> Any:
    child = multiprocessing.get_context("fork").Process(target=live, args=(out, *arguments))
    child.start()
    return child


def kill_at_random(out: Path, kills: int, rng: random.Random, *arguments: Any) -> Witness:
    witness = Witness(out)
    for _ in range(kills):
        child = started(out, *arguments)
        assert child.pid is not None
        before = witness.step
        deadline = time.monotonic() + 120
        if rng.random() < 0.8:  # most of the time, once it has got somewhere
            while child.is_alive() and time.monotonic() < deadline and progress(out) <= before:
                time.sleep(0.01)
        child.join(rng.uniform(0.0, 0.6))
        assert child.is_alive(), "it ended before it was killed often enough: raise STEPS, or it failed by itself"
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        witness.look()
    return witness


def progress(out: Path) -> int:
    steps = [int(path.name.partition("-")[2]) for path in (out / "checkpoints").glob("step-??????")]
    return max(steps, default=-1)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "staleness", "kills", "steps"), CASES)
def test_kills_lose_nothing(seed: int, staleness: int, kills: int, steps: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    witness = kill_at_random(out, kills, random.Random(seed), staleness, steps)
    child = started(out, staleness, steps)
    child.join()
    assert child.exitcode == 0
    witness.look()
    learned = witness.record(steps)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "staleness/max" in line] == list(range(1, steps + 1))
    assert max(line["staleness/max"] for line in lines if "staleness/max" in line) <= staleness
    assert len(learned) == steps * 2 * 2
    # without staleness a checkpoint has nothing under way that is complete
    assert len(witness.stored) > kills / 5 or not staleness, "hardly anything was stored"
    assert {rollout: learned.get(rollout) for rollout in witness.stored} == witness.stored


@pytest.mark.long
@pytest.mark.parametrize(("seed", "staleness"), [(4, 1), (5, 3)])
def test_kills_of_a_fixed_schedule_change_nothing(seed: int, staleness: int, tmp_path: Path) -> None:
    """Bit for bit: the weights, and every log-prob of every rollout."""
    ended = []
    for name, kills in (("whole", 0), ("killed", FIXED_KILLS)):
        out = tmp_path / name
        witness = kill_at_random(out, kills, random.Random(seed), staleness, FIXED_STEPS, True)
        child = started(out, staleness, FIXED_STEPS, True)
        child.join()
        assert child.exitcode == 0
        witness.look()
        weights = load_file(out / "checkpoints" / f"step-{FIXED_STEPS:06d}" / "model" / "model.safetensors")
        ended.append(
            (witness.record(FIXED_STEPS), {name: tensor.numpy().tobytes() for name, tensor in weights.items()})
        )
    assert ended[0] == ended[1]
    assert len(ended[0][0]) == FIXED_STEPS * 2 * 2
