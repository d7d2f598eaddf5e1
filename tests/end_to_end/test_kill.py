"""A run that is killed without warning, over and over, and resumed each time: nothing is lost, doubled or torn."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from toolwise.training import checkpoint
from toolwise.training.token_records import read_tokens

SAVE_EVERY, VALIDATE_EVERY, HELD_OUT, GROUP = 2, 3, 4, 6
START, STEP, SAVING, SAVED = "", r"step-\d+\.jsonl", r"step-\d+\.tmp-.*", r"step-\d+"
Cli = Callable[..., Any]
Moment = tuple[str, float]
"""What has to appear among rollouts and checkpoints, and how many seconds after that to strike."""


class Victim:
    """A run in a folder, and what must not change in it any more."""

    def __init__(self, config: Path, steps: int, cli: Cli) -> None:
        self.config, self.out, self.steps, self.cli = config, config.parent / "run", steps, cli
        self.kills = 0
        self.kept_step = -1
        self.kept: dict[str, bytes] = {}

    def command(self) -> list[str]:
        resumed = ["--resume"] if (self.out / "config.toml").exists() else []
        return ["train", str(self.config), "--out", str(self.out), *resumed]

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "toolwise", *self.command()]
        with self.out.with_suffix(".stderr").open("ab") as err:
            return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=err)

    def live(self, moments: Iterable[Moment]) -> None:
        """Killed at each of these moments, and in the end left alone."""
        for sign, delay_s in moments:
            child = self.start()
            there = self.signs()
            while sign and child.poll() is None and not any(re.fullmatch(sign, s) for s in self.signs() - there):
                time.sleep(0.001)
            time.sleep(delay_s)
            child.kill()
            if child.wait() == 0:
                return
            self.kills += 1
            self.check_kept()
        ended = self.cli(*self.command())
        assert ended.status == 0, ended.err

    def signs(self) -> set[str]:
        return {path.name for path in (*self.out.glob("rollouts/*"), *self.out.glob("checkpoints/*"))}

    def check_kept(self) -> None:
        """Whatever a checkpoint vouched for is still there, byte for byte; none of it was ever done again."""
        found = checkpoint.latest(self.out / "checkpoints")
        step = found.step if found is not None else -1
        assert step >= self.kept_step
        kept = self.record_until(step)
        assert {name: kept.get(name) for name in self.kept} == self.kept
        self.kept_step, self.kept = step, kept

    def record_until(self, last: int) -> dict[str, bytes]:
        """Metrics and rollouts up to a step. A step's metrics have times in them: done again, they would be others."""
        record = {}
        file = self.out / "metrics.jsonl"
        for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else ():
            if (step := json.loads(line)["step"]) <= last:
                record[f"metrics {step} {b'eval/' in line}"] = line
        for path in self.out.glob("rollouts/????-*.*"):
            if int(path.stem.partition("-")[2]) <= last:
                record[path.name] = path.read_bytes()
        return record

    def check_whole(self) -> None:
        """The run is over, and its folder is that of a run that nobody ever disturbed."""
        self.check_kept()
        steps = range(1, self.steps + 1)
        validated = [0, *(step for step in steps if step % VALIDATE_EVERY == 0 or step == self.steps)]
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_bytes().splitlines()]
        assert [line["step"] for line in lines if "eval/n" not in line] == list(steps)
        assert [line["step"] for line in lines if "eval/n" in line] == validated
        assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
        names = [f"step-{step:06d}" for step in steps] + [f"eval-{step:06d}" for step in validated]
        found = sorted(path.name for path in (self.out / "rollouts").iterdir())
        ends = ("jsonl", "tokens.parquet", "index.parquet")
        assert found == sorted(["vocabulary.ndjson", *(f"{name}.{end}" for name in names for end in ends)])
        for name in names:
            records = [json.loads(line) for line in (self.out / "rollouts" / f"{name}.jsonl").open("rb")]
            assert len(records) == (HELD_OUT if name.startswith("eval") else 2 * GROUP)
            tokens = read_tokens(self.out / "rollouts" / f"{name}.tokens.parquet")
            assert {row.rollout_id for row in tokens} <= {record["rollout_id"] for record in records}
        assert [str(path) for path in self.out.rglob("*") if re.search(r"\.(tmp|old)\b", path.name)] == []
        kept = sorted(path.name for path in (self.out / "checkpoints").iterdir())
        last_two = [f"step-{self.steps - SAVE_EVERY:06d}", f"step-{self.steps:06d}"]
        assert kept[-2:] == last_two
        assert len(kept) <= 3  # and the best, where it is older
        summary = json.loads((self.out / "summary.json").read_bytes())
        assert (summary["steps"], summary["interrupted"]) == (self.steps, False)
        assert summary["before"]["n"] == summary["after"]["n"] == HELD_OUT
        assert (self.out / "report.html").is_file()


@pytest.fixture
def make_victim(tmp_path: Path, cli: Cli, make_config: Callable[..., Path]) -> Callable[[int], Victim]:
    def make(steps: int) -> Victim:
        changes = {
            "rollout": {"n": GROUP, "max_new_tokens": 24},
            "multi_turn": {"max_turns": 2},
            "router": {"enable": True, "cost": "calls", "budgets": [{"limit": 0.5}], "calibration": 0.0},
            "validation": {"every": VALIDATE_EVERY},
            "trainer": {"total_steps": steps, "save_every": SAVE_EVERY},
        }
        return Victim(make_config(tmp_path, changes), steps, cli)

    return make


@pytest.mark.long
def test_a_run_survives_a_kill_while_it_writes_a_checkpoint(make_victim: Callable[[int], Victim]) -> None:
    victim = make_victim(4)
    victim.live([(r"step-000002\.tmp-.*", random.Random(1).uniform(0, 0.05))])
    assert victim.kills == 1
    victim.check_whole()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_survives_ten_kills(seed: int, make_victim: Callable[[int], Victim]) -> None:
    """Spread over its life: while it starts, before its first checkpoint, in the middle of steps and of checkpoints."""
    rng = random.Random(seed)
    moments: list[Moment] = [(START, rng.uniform(0, 1)), (START, rng.uniform(4, 7))]
    moments += [(SAVING, rng.uniform(0, 0.1)) for _ in range(3)]
    moments += [(STEP, rng.uniform(0, 0.4)) for _ in range(3)]
    moments += [(SAVED, rng.uniform(0, 0.1)) for _ in range(2)]
    rng.shuffle(moments)
    victim = make_victim(20)
    victim.live(moments)
    assert victim.kills == 10
    victim.check_whole()
