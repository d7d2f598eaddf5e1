"""TensorBoard, W&B and MLflow for real, in .venv-trackers (`make trackers-env`): what they stored is read back with
their own libraries and compared with metrics.jsonl."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
PROGRAM = ROOT / "tests" / "helpers" / "tracker_programs.py"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="the trackers are not installed: make trackers-env"),
]


def start(folder: Path, *arguments: str, **environment: str) -> str:
    """The last line that the program prints. To files, not pipes: W&B's service may outlive it."""
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        ended = subprocess.run(
            [PYTHON, PROGRAM, *arguments], cwd=folder, env=env, stdout=out, stderr=err, timeout=500, check=False
        )
        err.seek(0)
        assert ended.returncode == 0, err.read()
        out.seek(0)
        return out.read().splitlines()[-1]


def trackers(folder: Path) -> list[Any]:
    store = {"uri": f"sqlite:///{folder}/mlflow.db"}
    return [
        {"name": "tensorboard", "kwargs": {"every": 2}},
        {"name": "wandb", "kwargs": {"mode": "offline", "every": 2}},
        {"name": "mlflow", "kwargs": {**store, "every": 2}},
    ]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with all three at once, interrupted after step 3 with a checkpoint of step 2, and resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    settings = json.dumps({"trackers": trackers(folder)})
    for steps in (3, 4):
        seen = json.loads(start(folder, "train", str(folder), str(steps), settings))
        assert [(entry["errors"], entry["dropped"]) for entry in seen] == [(0, False)] * 3, seen
        shutil.rmtree(folder / "run" / "checkpoints" / "step-000003", ignore_errors=True)
    return folder / "run", json.loads(start(folder, "read", str(folder)))


def expected(run: Path) -> dict[tuple[str, int], float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(name, row["step"]): v for row in rows for name, v in row.items() if name != "step" and v is not None}


def last_values(metrics: dict[str, list[list[float]]]) -> dict[tuple[str, int], float]:
    return {(name, int(step)): value for name, points in metrics.items() for step, value in points}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_every_number_is_that_of_metrics_jsonl(name: str, stored: tuple[Path, dict[str, Any]]) -> None:
    run, read = stored
    wanted = expected(run)
    values = last_values(read[name]["metrics"])
    assert {key: values.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-6)  # TensorBoard has 32 bits


def test_tensorboard_drops_the_step_that_was_repeated_and_has_tables_and_curves(
    stored: tuple[Path, dict[str, Any]],
) -> None:
    found = stored[1]["tensorboard"]
    assert [step for step, _ in found["metrics"]["score/mean"]] == [1, 2, 3, 4]
    assert "model.path = 'builtin:small'" in found["texts"]["settings"][0][1]
    assert "| rollout_id |" in found["texts"]["rollouts/train"][0][1]
    assert found["images"] == ["report/curves"]


def test_wandb_continues_the_same_run_with_config_tables_and_report(stored: tuple[Path, dict[str, Any]]) -> None:
    found = stored[1]["wandb"]
    assert len(found["ids"]) == 1
    assert found["config"]["model"]["path"] == "builtin:small"
    kinds = [kind for kind, _ in found["artifacts"]]
    assert kinds.count("report") == 2
    assert "run_table" in kinds
    assert ["report", ["report.html", "report.png", "summary.json"]] in found["artifacts"]


def test_mlflow_continues_the_same_run_with_params_tables_and_report(stored: tuple[Path, dict[str, Any]]) -> None:
    found = stored[1]["mlflow"]
    assert (found["runs"], found["status"]) == (1, "FINISHED")
    assert found["params"]["model.path"] == "builtin:small"
    assert {"report.html", "settings.json", "rollouts/train-000002.json", "rollouts/eval-000004.json"} <= {
        *found["files"]
    }


def test_servers_that_never_answer_cost_only_their_time_limit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        wandb = {"name": "wandb", "kwargs": {"mode": "online"}}
        names = ["tensorboard", wandb, {"name": "mlflow", "kwargs": {"uri": address}}]
        settings = json.dumps({"trackers": names, "observer_timeout_s": 4.0})
        began = time.monotonic()
        line = start(tmp_path, "train", str(tmp_path), "2", settings, WANDB_BASE_URL=address, WANDB_API_KEY="0" * 40)
        seconds = time.monotonic() - began
    seen = {entry["name"]: entry for entry in json.loads(line)}
    assert seen["tracker tensorboard"]["errors"] == 0
    for name in ("tracker wandb", "tracker mlflow"):
        assert seen[name]["dropped"], seen
        assert "took longer than trainer.observer_timeout_s = 4" in seen[name]["first_error"]
    said = (tmp_path / "err").read_text()
    assert said.count("tracker wandb failed in start") == said.count("tracker mlflow failed in start") == 1
    assert seconds < 240
