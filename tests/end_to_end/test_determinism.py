"""`deterministic = true`: the same run again, in one go or in pieces, gives the same figures to the last digit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JUDGE = """
import os, signal, time
from toolwise.demo.reward import small_world_reward

calls = 0

def judge(messages, ground_truth, step=0):
    global calls
    marker = os.environ.get("MARKER")
    calls += marker is not None and step == 2
    if marker is not None and step == 2 and calls == 5:
        open(marker, "w").close()
        if "INTERRUPT" in os.environ:
            signal.raise_signal(signal.SIGINT)
        else:
            time.sleep(2)
    return small_world_reward(messages, ground_truth)
"""
"""A reward that knows when the third step has come, after the four tasks of a validation. It interrupts its own process
there, or writes a file and waits."""

STEPS = 4
Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("determinism")
    (folder / "judge.py").write_text(JUDGE, encoding="utf-8")
    changes = {
        "deterministic": True,
        "reward": {"function": "judge.py:judge", "sandbox": {"tier": "off"}},  # it writes a file
        "actor": {"lr": 1e-3, "mini_batches": 2, "warmup_steps": 3, "weight_decay": 0.01},
        "validation": {"every": 2},
        "trainer": {"total_steps": STEPS, "save_every": 2, "console": False},
    }
    return make_config(folder, changes)


@pytest.fixture(scope="module")
def straight(config: Path, cli: Cli) -> Path:
    return train(cli, config, config.parent / "straight")


def train(cli: Cli, config: Path, out: Path, *more: str) -> Path:
    ended = cli("train", config, "--out", out, *more)
    assert ended.status == 0, ended.err
    return out


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # What the engine computed and what it found in its cache is a matter of what ran before in the same process.
    apart = ("time/", "engine/")
    return [{name: value for name, value in line.items() if not name.startswith(apart)} for line in lines]


def assert_same(run: Path, straight: Path) -> None:
    assert metrics(run) == metrics(straight)
    rollouts = {path.name: path.read_bytes() for path in (straight / "rollouts").iterdir()}
    assert {path.name: path.read_bytes() for path in (run / "rollouts").iterdir()} == rollouts
    last = Path("checkpoints") / f"step-{STEPS:06d}"
    for name in ("model/model.safetensors", "actor.safetensors", "actor.json", "batches.json"):
        assert (run / last / name).read_bytes() == (straight / last / name).read_bytes(), name
    for when in ("before", "after"):
        assert summary(run)[when] == summary(straight)[when]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return found


@pytest.mark.long
def test_something_is_learned_in_each_step(straight: Path) -> None:
    """Else the other tests would compare nothing with nothing."""
    updates = [line["actor/updates"] for line in metrics(straight) if "actor/updates" in line]
    assert len(updates) == STEPS
    assert sum(updates) >= 2
    assert [line["step"] for line in metrics(straight)] == [0, 1, 2, 2, 3, 4, 4]


@pytest.mark.long  # the frozen run gives its figures again, and an interrupted one those of a straight one
def test_the_same_run_twice(straight: Path, config: Path, cli: Cli) -> None:
    assert_same(train(cli, config, config.parent / "twice"), straight)


@pytest.mark.long
def test_a_run_that_ended_earlier_and_goes_on(straight: Path, config: Path, cli: Cli) -> None:
    out = config.parent / "pieces"
    train(cli, config, out, "--set", "trainer.total_steps=2")
    assert_same(train(cli, config, out, "--resume"), straight)


def interrupt_this_process(config: Path, out: Path, cli: Cli) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MARKER", str(out.with_suffix(".third-step")))
        patched.setenv("INTERRUPT", "")
        ended = cli("train", config, "--out", out)
    return ended.status, ended.out, ended.err


def interrupt_another(config: Path, out: Path, _: Cli) -> tuple[int, str, str]:
    marker = out.with_suffix(".third-step")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MARKER": str(marker)}
    command = [sys.executable, "-m", "toolwise", "train", str(config), "--out", str(out)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not marker.exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    told, err = child.communicate(timeout=120)
    return child.returncode, told, err


@pytest.mark.long
@pytest.mark.parametrize("interrupt", [interrupt_this_process, pytest.param(interrupt_another, marks=pytest.mark.long)])
def test_a_run_that_is_interrupted_by_ctrl_c_and_goes_on(
    interrupt: Callable[[Path, Path, Cli], tuple[int, str, str]], straight: Path, config: Path, cli: Cli
) -> None:
    out = config.parent / interrupt.__name__
    status, told, err = interrupt(config, out, cli)
    assert status == 130, err
    assert "SIGINT: finishing this step and saving" in err
    assert f"stopped after step 3; resume with: toolwise resume {out}" in told
    assert summary(out)["interrupted"] is True
    assert_same(train(cli, config, out, "--resume"), straight)
