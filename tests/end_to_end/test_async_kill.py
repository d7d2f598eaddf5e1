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

from toolwise.envs.base import BaseEnv
from toolwise.training import checkpoint
from toolwise.training.rollout_index import token_path
from toolwise.training.rollout_paths import rollout_files
from toolwise.training.stored_groups import unpack_group
from toolwise.training.token_records import read_tokens
from toolwise.training.trainer import Training

STEPS, STALENESS, KILLS = 240, 2, 50
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


def live(out: Path) -> None:
    """One process, from the start or the last checkpoint to the end, unless it is killed."""
    trainer = {
        "mode": "async",
        "max_staleness": STALENESS,
        "total_steps": STEPS,
        "save_every": 1,
        "keep_best": False,
        "console": False,
    }
    run = async_run(STALENESS, by_length, world=SlowWorld, **{**SETTINGS, "trainer": trainer})
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


def kill_at_random(out: Path, kills: int, rng: random.Random) -> Witness:
    witness, context = Witness(out), multiprocessing.get_context("fork")
    for _ in range(kills):
        child = context.Process(target=live, args=(out,))
        child.start()
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
@pytest.mark.parametrize("seed", [0])
def test_fifty_kills_lose_nothing(seed: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    witness = kill_at_random(out, KILLS, random.Random(seed))
    child = multiprocessing.get_context("fork").Process(target=live, args=(out,))
    child.start()
    child.join()
    assert child.exitcode == 0
    witness.look()
    learned = witness.record(STEPS)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "staleness/max" in line] == list(range(1, STEPS + 1))
    assert max(line["staleness/max"] for line in lines if "staleness/max" in line) <= STALENESS
    assert len(learned) == STEPS * 2 * 2
    assert len(witness.stored) > KILLS / 5, "hardly anything was stored"
    assert {rollout: learned.get(rollout) for rollout in witness.stored} == witness.stored
