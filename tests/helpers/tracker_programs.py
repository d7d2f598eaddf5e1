"""Programs that the tests of trackers start in .venv-trackers: train with trackers, and read back what one stored.

`python tracker_programs.py train FOLDER STEPS SETTINGS` and `… read FOLDER TRACKER`, which prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "name": "tracked",
    "model": {"path": "builtin:small", "device": "cpu"},
    "data": {"train": "train.jsonl", "val": "heldout.jsonl", "batch_size": 2},
    "tools": ["calculator", "search"],
    "rollout": {"n": 4, "max_new_tokens": 32},
    "multi_turn": {"max_turns": 3},
    "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}},
    "validation": {"every": 2},
    "trainer": {"total_steps": 4, "save_every": 2, "console": False, "observer_timeout_s": 60.0},
}
REWARD = "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'] or '')) % 101 / 101\n"


class KillsServer:
    """A callback that kills a server with its processes after a step."""

    def __init__(self, process: int, step: int) -> None:
        self.process, self.step = process, step

    def on_step(self, event: Any) -> None:
        if event.step == self.step:
            os.killpg(self.process, signal.SIGKILL)

    def on_validation(self, event: Any) -> None: ...

    def on_checkpoint(self, event: Any) -> None: ...

    def on_end(self, event: Any) -> None: ...


def train(folder: Path, steps: int, trainer: dict[str, Any]) -> None:
    """Train, or resume, the run in `folder` until `steps` are done."""
    import tomli_w

    import toolwise
    from toolwise.demo.tasks import write_rows

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", 8, seed=0, split="train")
    write_rows(folder / "heldout.jsonl", 4, seed=0, split="heldout")
    (folder / "varied.py").write_text(REWARD, encoding="utf-8")
    config = CONFIG | {"trainer": {**CONFIG["trainer"], **trainer, "total_steps": steps}}
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    result = toolwise.train(path, out=folder / "run", resume=(folder / "run" / "config.toml").exists())
    print(json.dumps(result.summary["observers"]))


def read(folder: Path, tracker: str) -> dict[str, Any]:
    """What the tracker stored, read with its own library."""
    readers = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": lambda run: read_mlflow(run.parent)}
    return readers[tracker](folder / "run")


def read_tensorboard(run: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    tags = events.Tags()
    texts = {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)] for tag in tags["tensors"]
    }
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    return {"metrics": scalars, "texts": texts, "images": tags["images"]}


BLOCK, HEADER = 32768, struct.Struct("<IHB")
"""Frames of an offline run's file, as in LevelDB's log: checksum, length and part (whole, first, middle, last)."""


def wandb_frames(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B", data[:4]
    position, frame = 7, b""
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, part = HEADER.unpack_from(data, position)
        position += HEADER.size
        frame += data[position : position + length]
        position += length
        if part in (1, 4):
            yield frame
            frame = b""


def wandb_records(run: Path) -> Iterator[Any]:
    """W&B ships no reader, but the definitions of its records."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for frame in wandb_frames(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(frame)
            yield record


def read_wandb(run: Path) -> dict[str, Any]:
    metrics: dict[str, list[Any]] = {}
    ids, config, artifacts = set(), {}, []
    for record in wandb_records(run):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            ids.add(record.run.run_id)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if isinstance(value, int | float) and not name.startswith("_"):
                    metrics.setdefault(name, []).append((row.get("training_step"), value))
        elif kind == "artifact":
            artifacts.append((record.artifact.type, [entry.path for entry in record.artifact.manifest.contents]))
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifact = record.request.log_artifact.artifact
            artifacts.append((artifact.type, [entry.path for entry in artifact.manifest.contents]))
    return {"ids": sorted(ids), "config": config, "metrics": metrics, "artifacts": artifacts}


def read_mlflow(folder: Path) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("toolwise")
    runs = client.search_runs([experiment.experiment_id]) if experiment is not None else []
    if not runs:
        return {"runs": 0}
    run = runs[0]
    metrics = {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics
    }
    files = [file.path for file in client.list_artifacts(run.info.run_id)]
    files += [file.path for file in client.list_artifacts(run.info.run_id, "rollouts")]
    return {
        "runs": len(runs),
        "status": run.info.status,
        "params": run.data.params,
        "metrics": metrics,
        "files": files,
        "tables": {file: table_ids(client, run.info.run_id, file) for file in files if file.startswith("rollouts/")},
    }


def table_ids(client: Any, run_id: str, file: str) -> list[str]:
    """The rollouts in a table, as MLflow's own pages read it."""
    import pandas

    return list(pandas.read_json(client.download_artifacts(run_id, file), orient="split")["rollout_id"])


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        print(json.dumps(read(Path(sys.argv[2]), sys.argv[3])))
