"""TensorBoard, W&B and MLflow for real, each in an environment of its own (`make trackers-env`): what they stored is
read back with their own libraries and compared with metrics.jsonl."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-trackers"
PROGRAM = ROOT / "tests" / "helpers" / "tracker_programs.py"
TRACKERS = ("tensorboard", "wandb", "mlflow")
pytestmark = [pytest.mark.long]
Stored = Callable[[str], tuple[Path, dict[str, Any]]]


def python_of(name: str) -> Path:
    path = ENVIRONMENTS / name / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{name} is not installed: make trackers-env")
    return path


def start(name: str, folder: Path, *arguments: str, **environment: str) -> str:
    """The last line that the program prints, in the environment of a tracker. To files, not pipes: W&B's service may
    outlive it."""
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        command = [python_of(name), PROGRAM, *arguments]
        ended = subprocess.run(command, cwd=folder, env=env, stdout=out, stderr=err, timeout=500, check=False)
        err.seek(0)
        assert ended.returncode == 0, err.read()
        out.seek(0)
        return out.read().splitlines()[-1]


def entry(name: str, folder: Path) -> dict[str, Any]:
    options = {"wandb": {"mode": "offline"}, "mlflow": {"uri": f"sqlite:///{folder}/mlflow.db"}}
    return {"name": name, "kwargs": {"every": 1, **options.get(name, {})}}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A run with a tracker, interrupted after step 3 with a checkpoint of step 2, and resumed: step 3 is repeated."""

    @cache
    def train(name: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(name)
        settings = json.dumps({"trackers": [entry(name, folder)]})
        for steps in (3, 4):
            seen = json.loads(start(name, folder, "train", str(folder), str(steps), settings))
            assert [(one["errors"], one["dropped"]) for one in seen] == [(0, False)], seen
            shutil.rmtree(folder / "run" / "checkpoints" / "step-000003", ignore_errors=True)
        return folder / "run", json.loads(start(name, folder, "read", str(folder), name))

    return train


def expected(run: Path) -> dict[tuple[str, int], float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(name, row["step"]): v for row in rows for name, v in row.items() if name != "step" and v is not None}


def last_values(metrics: dict[str, list[list[float]]]) -> dict[tuple[str, int], float]:
    return {(name, int(step)): value for name, points in metrics.items() for step, value in points}


@pytest.mark.parametrize("name", TRACKERS)
def test_every_number_is_that_of_metrics_jsonl(name: str, stored: Stored) -> None:
    run, read = stored(name)
    wanted = expected(run)
    values = last_values(read["metrics"])
    assert {key: values.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-6)  # TensorBoard has 32 bits


def test_tensorboard_drops_the_step_that_was_repeated_and_has_tables_and_curves(stored: Stored) -> None:
    found = stored("tensorboard")[1]
    assert [step for step, _ in found["metrics"]["score/mean"]] == [1, 2, 3, 4]
    assert "model.path = 'builtin:small'" in found["texts"]["settings"][0][1]
    assert "| rollout_id |" in found["texts"]["rollouts/train"][0][1]
    assert found["images"] == ["report/curves"]


def test_wandb_continues_the_same_run_with_config_tables_and_report(stored: Stored) -> None:
    found = stored("wandb")[1]
    assert len(found["ids"]) == 1
    assert found["config"]["model"]["path"] == "builtin:small"
    kinds = [kind for kind, _ in found["artifacts"]]
    assert kinds.count("report") == 2
    assert "run_table" in kinds
    assert ["report", ["report.html", "report.png", "summary.json"]] in found["artifacts"]


def test_mlflow_continues_the_same_run_with_params_tables_and_report(stored: Stored) -> None:
    found = stored("mlflow")[1]
    assert (found["runs"], found["status"]) == (1, "FINISHED")
    assert found["params"]["model.path"] == "builtin:small"
    assert {"report.html", "settings.json", "rollouts/train-000002.json", "rollouts/eval-000004.json"} <= {
        *found["files"]
    }


def test_mlflow_has_each_rollout_of_a_repeated_step_once(stored: Stored) -> None:
    tables = stored("mlflow")[1]["tables"]
    assert "rollouts/train-000003.json" in tables
    for table, ids in tables.items():
        assert ids, table
        assert sorted(ids) == sorted(set(ids)), table


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_several_at_once_store_the_same(name: str, tmp_path: Path) -> None:
    settings = json.dumps({"trackers": [entry("tensorboard", tmp_path), entry(name, tmp_path)]})
    seen = json.loads(start(name, tmp_path, "train", str(tmp_path), "2", settings))
    assert [(one["errors"], one["dropped"]) for one in seen] == [(0, False)] * 2, seen
    found = [json.loads(start(name, tmp_path, "read", str(tmp_path), one)) for one in ("tensorboard", name)]
    wanted = expected(tmp_path / "run")
    for values in (last_values(one["metrics"]) for one in found):
        assert {key: values.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-6)


def test_an_mlflow_server_that_is_killed_in_mid_run_costs_seconds(tmp_path: Path) -> None:
    python, (port, uri) = python_of("mlflow"), free_address()
    files = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), *files]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for_port(port, server)
        trackers = [{"name": "mlflow", "kwargs": {"uri": uri, "every": 1}}]
        killer = [{"name": f"{PROGRAM}:KillsServer", "kwargs": {"process": server.pid, "step": 2}}]
        settings = json.dumps({"trackers": trackers, "callbacks": killer})
        seen, killing = json.loads(start("mlflow", tmp_path, "train", str(tmp_path), "6", settings))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, 9)
        server.wait()
    assert (killing["errors"], killing["dropped"]) == (0, False)
    assert seen["dropped"], seen
    assert "took longer" not in seen["first_error"]  # than the time limit, for which the run would have waited
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in metrics) == 6
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        sent = database.execute("SELECT step FROM metrics WHERE key = 'score/mean' ORDER BY step").fetchall()
    assert sent == [(1,), (2,)]
    written = [(tmp_path / "run" / "rollouts" / f"step-{step:06d}.jsonl").stat().st_mtime for step in (2, 6)]
    waited = written[1] - written[0] - sum(line.get("time/step_s", 0.0) for line in metrics if line["step"] > 2)
    print(f"from step 2 to step 6 the run did something else than training for {waited:.0f} s")
    assert waited < 60  # with MLflow's own number of tries minutes for each call


def free_address() -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return port, f"http://127.0.0.1:{port}"


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError("the server did not start")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_servers_that_never_answer_cost_only_their_time_limit(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {"wandb": {"mode": "online"}, "mlflow": {"uri": address}}
        silent = {"name": name, "kwargs": options[name]}
        settings = json.dumps({"trackers": ["tensorboard", silent], "observer_timeout_s": 4.0})
        began = time.monotonic()
        keys = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}
        line = start(name, tmp_path, "train", str(tmp_path), "2", settings, **keys)
        seconds = time.monotonic() - began
    seen = {one["name"]: one for one in json.loads(line)}
    assert seen["tracker tensorboard"]["errors"] == 0
    tracker = seen[f"tracker {name}"]
    assert tracker["dropped"], seen
    assert "took longer than trainer.observer_timeout_s = 4" in tracker["first_error"]
    assert (tmp_path / "err").read_text().count(f"tracker {name} failed in start") == 1
    assert seconds < 240
