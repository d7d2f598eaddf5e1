"""A short training to watch, and links to the pages of a rollout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tomli_w

from toolwise import Callback, StepEvent

STEPS = 4
CONFIG: dict[str, Any] = {
    "name": "short",
    "model": {"path": "builtin:small", "device": "cpu"},
    "data": {"train": "train.jsonl", "val": "heldout.jsonl", "batch_size": 8},
    "tools": ["calculator", "search"],
    "rollout": {"n": 4, "max_new_tokens": 32},
    "multi_turn": {"max_turns": 3},
    "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
    "algorithm": {"adv_estimator": "gigpo"},
    "actor": {"lr": 1e-4},
    "validation": {"every": 2},
    "records": {"plain_steps": 1},
    "trainer": {"total_steps": STEPS, "save_every": 100, "console": False},
}
"""Files of earlier steps are compressed while pages show them."""
HELD = (1, 2)
"""Steps after which a training waits until it has been seen."""
TURNS: dict[str, Any] = {
    "name": "turns",
    "algorithm": {"adv_estimator": "grpo", "zero_std_groups": "keep"},
    "router": {"enable": True, "every": "turn", "cost": "calls", "budgets": [{"limit": 0.3}]},
}
CLUSTER: dict[str, Any] = {"name": "cluster", "cluster": {"workers": 1, "worker_cpus": 0.5, "object_store_mb": 100}}

LEARNERS: dict[str, Any] = {
    "name": "learners",
    "cluster": CLUSTER["cluster"] | {"learners": 2, "learner_cpus": 0.5},
}


class Training:
    """A short training in a process of its own, which `hold`s after steps 1 and 2 until it is told to go on."""

    def __init__(self, folder: Path, changes: Mapping[str, Any] = {}, *arguments: str) -> None:
        from toolwise.demo.tasks import write_rows

        folder.mkdir(parents=True, exist_ok=True)
        write_rows(folder / "train.jsonl", 64, seed=0, split="train")
        write_rows(folder / "heldout.jsonl", 8, seed=0, split="heldout")
        config = CONFIG | dict(changes)
        config["trainer"] = config["trainer"] | {"callbacks": [f"{__file__}:HoldSteps"], "observer_timeout_s": 600}
        (folder / "run.toml").write_text(tomli_w.dumps(config))
        self.out = folder / config["name"]
        command = [sys.executable, "-m", "toolwise", "train", folder / "run.toml", "--out", self.out, *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    def wait_for(self, path: str, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.out / path).exists():
            assert time.monotonic() < deadline, f"no {path}"
            assert self.process.poll() in (None, 0), self.process.stderr and self.process.stderr.read()
            time.sleep(0.05)

    def has_done_a_step(self) -> bool:
        """Or has ended, however."""
        return (self.out / "rollouts/step-000001.jsonl").exists() or self.process.poll() is not None

    def go_on(self, step: int) -> None:
        """After `step`."""
        (self.out.parent / f"seen-{step}").touch()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Stop it if it still runs; Ray's processes end with it."""
        for step in HELD:
            self.go_on(step)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()

    def finish(self) -> Path:
        for step in HELD:
            self.go_on(step)
        _, err = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, err
        return self.out


class HoldSteps(Callback):
    """Holds a training after a step until somebody has seen it on a page."""

    def on_step(self, event: StepEvent) -> None:
        while event.step in HELD and not (event.run_folder.parent / f"seen-{event.step}").exists():
            time.sleep(0.05)


def rollout_link(page: str, row: dict[str, Any], **more: object) -> str:
    parameters = {"run": 0, "file": row["file"], "id": row["rollout_id"], "group": row["group_id"], **more}
    return f"#/{page}?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in parameters.items())


def wait_until(page: Any, condition: str) -> None:
    """Playwright's own wait evaluates text in the page, which its policy forbids."""
    deadline = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def wait_until_settled(page: Any) -> None:
    """Until a page of the fixture `open_page` has asked for everything that it shows, and has drawn it."""
    frames = """() => new Promise((done) => {
        requestAnimationFrame(() => setTimeout(() => requestAnimationFrame(() => setTimeout(done))));
    })"""
    deadline, quiet = time.monotonic() + 10, 0
    while quiet < 2:  # an answer may lead to the next question
        assert time.monotonic() < deadline, page.open_requests
        page.evaluate(frames)
        quiet = 0 if page.open_requests else quiet + 1


def first_row(run: Path, file: str, **wanted: object) -> dict[str, Any]:
    """The index's row of the first rollout that has these values."""
    from toolwise.view.rollout_store import RunStore

    rows = RunStore(run).of_file(file).to_pylist()
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def drawn_lines(page: Any, title: str) -> dict[str, list[tuple[int, float]]]:
    """Label -> steps and values of the lines of a chart, without those of a step that has no value."""
    found = page.evaluate(
        """title => {
            const chart = [...document.querySelectorAll("figure.chart")].find((one) => one.dataset.title === title);
            const { data, series } = chart.querySelector(":scope > div").chart;
            const valuesOf = (index) => data[0].map((step, at) => [step, data[index + 1][at]]);
            return series.slice(1).map((line, index) => [line.label, valuesOf(index)]);
        }""",
        title,
    )
    return {label: [(step, value) for step, value in line if value is not None] for label, line in found}


def read_series(run: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, from the file; the last value of a step counts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sorted({row["step"]: row[name] for row in rows if name in row}.items())
