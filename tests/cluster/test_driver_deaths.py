"""The process of `toolwise train` is killed; `toolwise resume` goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import async_cases
import pytest
from cluster_cases import Workers

from toolwise import Callback

STEPS = 2
REWARD = Path(async_cases.__file__)
END_S = 90.0


class KillsDriver(Callback):
    """Kills the process that it is in after the first step, once."""

    def on_step(self, event: Any) -> None:
        marker = event.run_folder / "killed"
        if event.step == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def changes(**trainer: Any) -> dict[str, Any]:
    return {
        "cluster": {"address": "local", "workers": 2, "worker_cpus": 0.5, "learner_cpus": 0.5},
        "rollout": {"n": 3, "max_new_tokens": 12, "temperature": 2.0},
        "multi_turn": {"max_turns": 2},
        "reward": {"function": f"{REWARD}:by_length", "sandbox": {"tier": "off"}},
        "trainer": {"total_steps": STEPS, "save_every": 1, "async_checkpoints": False, **trainer},
        "validation": {"before": False},
        "deterministic": True,
    }


def learned(out: Path) -> list[tuple[Any, ...]]:
    """What each step rolled out and learned."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/updates" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    records = [
        [json.loads(line) for line in (out / "rollouts" / f"step-{step:06}.jsonl").read_text().splitlines()]
        for step in range(1, STEPS + 1)
    ]
    ids = [record["rollout_id"] for step in records for record in step]
    assert len(set(ids)) == len(ids) == STEPS * 6
    return [(line["score/mean"], line.get("actor/grad_norm"), line.get("actor/loss")) for line in steps]


@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_whose_driver_was_killed_resumes_on_a_simulated_cluster(
    compared: bool, cli: Any, make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If compared: it learns to the last bit what a run learns that nobody killed."""
    monkeypatch.setattr("toolwise.cluster.ray_cluster.RayCluster", lambda config: Workers())
    config, out = make_config(tmp_path, changes(callbacks=[f"{__file__}:KillsDriver"])), tmp_path / "run"
    if (child := os.fork()) == 0:
        try:
            cli("train", config, "--out", out)
        finally:
            os._exit(1)  # it lives
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    ended = cli("resume", out)
    assert ended.status == 0, ended.err
    found = learned(out)
    if compared:
        (tmp_path / "whole").mkdir()
        assert cli("train", make_config(tmp_path / "whole", changes()), "--out", tmp_path / "whole" / "run").status == 0
        assert found == learned(tmp_path / "whole" / "run")


def processes_with(token: str) -> list[str]:
    """Commands of this machine's processes that have the token, which all of a cluster's have."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and token.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")
@pytest.mark.parametrize("learners", [1, 2])
def test_a_run_whose_driver_was_killed_resumes_on_ray(learners: int, make_config: Any, tmp_path: Path) -> None:
    settings, token = changes(callbacks=[f"{__file__}:KillsDriver"]), secrets.token_hex(32)
    settings["cluster"]["learners"] = learners
    config, out = make_config(tmp_path, settings), tmp_path / "run"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **paths, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toolwise", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)

    killed = run("train", config, "--out", out)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    until = time.monotonic() + END_S
    while (left := processes_with(token)) and time.monotonic() < until:
        time.sleep(0.5)
    assert left == []
    resumed = run("resume", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert len(learned(out)) == STEPS
    assert processes_with(token) == []


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")
@pytest.mark.parametrize("learners", [1, 2])
def test_asynchronous_training_on_ray_stays_within_its_staleness(
    learners: int, make_config: Any, tmp_path: Path
) -> None:
    settings = changes(mode="async", max_staleness=1)
    settings["cluster"]["learners"] = learners
    settings["deterministic"] = False
    config, out = make_config(tmp_path, settings), tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "toolwise", "train", str(config), "--out", str(out)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(learned(out)) == STEPS
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(line["staleness/max"] <= 1 for line in lines if "actor/updates" in line)
