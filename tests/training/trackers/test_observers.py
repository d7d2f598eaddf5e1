"""Trackers and callbacks of a user's own: from a file by the command line, as objects by the API, and failing ones."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import threading
import time
import tomllib
from collections.abc import Callable as Function
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import toolwise
from toolwise.config.schema import RunConfig
from toolwise.config.trainer import TrainerConfig
from toolwise.errors import ConfigError
from toolwise.training.changes import changes_between
from toolwise.training.inputs import gather_inputs
from toolwise.training.trackers.observers import MAX_FAILURES, ContainedObserver, Observers, load_observers

Cli = Function[..., Any]
MakeConfig = Function[..., Path]

OBSERVERS = """
import json
from pathlib import Path
from toolwise import Callback, Stop, Tracker


class Lines(Tracker):
    def __init__(self, file):
        self.file = Path(file)

    def start(self, run):
        self.write(["start", run.name, run.step, run.total_steps, run.settings["trainer"]["save_every"]])

    def log(self, step, metrics):
        self.write(["log", step, sorted(metrics)])

    def close(self):
        self.write(["close"])

    def write(self, line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, event):
        assert (event.run_folder / "rollouts" / f"step-{event.step:06d}.jsonl").exists()
        return Stop(f"step {event.step} is enough") if event.step == self.step else None
"""


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return found


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """All metrics except times and the counters that only a run with observers has."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "faults/", "engine/"))} for line in lines]


@pytest.mark.long
def test_both_come_from_a_file_by_the_command_line_and_stop_a_run_that_can_be_resumed(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, tiny_run: Path
) -> None:
    (tmp_path / "mine.py").write_text(OBSERVERS)
    lines = tmp_path / "lines.jsonl"
    config = make_config(
        tmp_path,
        {
            "trainer": {
                "total_steps": 2,
                "save_every": 5,
                "trackers": [{"name": "mine.py:Lines", "kwargs": {"file": str(lines)}}],
                "callbacks": [{"name": "mine.py:StopAt", "kwargs": {"step": 1}}],
            }
        },
    )
    run = tmp_path / "run"
    ended = cli("train", config, "--out", run)
    assert ended.status == 0, ended.err
    why = f"callback {tmp_path / 'mine.py'}:StopAt: step 1 is enough"
    assert f"stopped after step 1 by {why}; resume with: toolwise resume {run}" in ended.out
    summary = summary_of(run)
    assert (summary["interrupted"], summary["stopped"], summary["steps"]) == (True, why, 1)
    assert [entry["errors"] for entry in summary["observers"]] == [0, 0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000000", "step-000001"]
    assert "step 1 is enough" in (run / "report.html").read_text()
    seen = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line[:2] for line in seen] == [["start", "tiny"], ["log", 0], ["log", 1], ["close"]]
    assert seen[0][2:] == [0, 2, 5]
    assert "eval/score" in seen[1][2]
    assert "faults/callback" in seen[2][2]

    ended = cli("resume", run)
    assert ended.status == 0, ended.err
    assert summary_of(run)["stopped"] is None
    seen = [json.loads(line) for line in lines.read_text().splitlines()][4:]
    assert [line[:2] for line in seen] == [["start", "tiny"], ["log", 2], ["log", 2], ["close"]]
    assert seen[0][2] == 1
    assert metrics_of(run) == metrics_of(tiny_run)  # the same numbers as without them and without the stop


@pytest.mark.long
def test_a_missing_file_is_named_before_anything_is_loaded(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    (tmp_path / "mine.py").write_text(OBSERVERS)
    trainer = {"total_steps": 1, "callbacks": [{"name": "mine.py:StopAt", "kwargs": {"step": 9}}]}
    config, run = make_config(tmp_path, {"trainer": trainer, "validation": {"before": False}}), tmp_path / "run"
    assert cli("train", config, "--out", run).status == 0
    (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    ended = cli("resume", run, "--set", "trainer.total_steps=2")
    assert ended.status == 2
    assert f"names missing files: {tmp_path / 'mine.py'} (trainer.callbacks)" in ended.err
    moved = f'trainer.callbacks=[{{name = "{tmp_path / "moved.py"}:StopAt", kwargs = {{step = 9}}}}]'
    ended = cli("resume", run, "--set", "trainer.total_steps=2", "--set", moved)
    assert ended.status == 0, ended.err
    assert any(change["key"].startswith("trainer.callbacks") for change in summary_of(run)["changes"])


ROWS = [{"prompt": f"What is {a} + {b}?", "ground_truth": str(a + b)} for a, b in ((12, 45), (67, 8), (31, 27))]
SMALL = {
    "model": {"device": "cpu"},
    "data": {"batch_size": 2},
    "rollout": {"n": 2, "max_new_tokens": 16},
    "multi_turn": {"max_turns": 2},
    "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
    "trainer": {"total_steps": 2, "save_every": 1, "console": False},
}


@dataclass
class Seen(toolwise.Callback):
    """Keeps all events; a dataclass, so that a run can record its arguments."""

    stop_at: int | None = None
    events: list[Any] = field(default_factory=list, init=False)

    def on_step(self, event: toolwise.StepEvent) -> toolwise.Stop | None:
        self.events.append(event)
        return toolwise.Stop("enough") if event.step == self.stop_at else None

    def on_validation(self, event: toolwise.ValidationEvent) -> None:
        self.events.append(event)

    def on_checkpoint(self, event: toolwise.CheckpointEvent) -> None:
        assert event.path.is_dir()
        self.events.append(event)

    def on_end(self, event: toolwise.EndEvent) -> None:
        assert (event.run_folder / "summary.json").exists()
        self.events.append(event)


class Logged(toolwise.Tracker):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        metrics.clear()  # type: ignore[attr-defined]  # changes only its own copy

    def close(self) -> None:
        self.closed += 1


def test_both_are_given_as_objects(tmp_path: Path, cli: Cli) -> None:
    tracker, callback, out = Logged(), Seen(stop_at=1), tmp_path / "run"
    trainer = {**SMALL["trainer"], "async_checkpoints": False}  # else the order of events depends on the disk
    config = {**SMALL, "trainer": trainer}
    result = toolwise.train(config, tasks=ROWS, val=ROWS[:1], out=out, trackers=[tracker], callbacks=callback)
    assert (tracker.steps, tracker.closed) == ([0, 1], 1)
    assert [type(event).__name__ for event in callback.events] == [
        "ValidationEvent",
        "CheckpointEvent",
        "StepEvent",
        "CheckpointEvent",
        "EndEvent",
    ]
    validation, _, step, saved, end = callback.events
    assert {event.run_folder for event in callback.events} == {out}
    assert (len(validation.rollouts), len(step.rollouts)) == (1, 4)
    assert "eval/score" in validation.metrics
    assert step.metrics["score/mean"] == end.metrics["score/mean"]
    assert saved.path == out / "checkpoints" / "step-000001"
    assert result.summary["stopped"].endswith("Seen: enough")
    assert end.summary["stopped"] == result.summary["stopped"]

    recorded = tomllib.loads((out / "config.toml").read_text())["trainer"]
    assert recorded["callbacks"] == [{"name": f"{Path(__file__)}:Seen", "kwargs": {"stop_at": 1}}]
    ended = cli("resume", out)
    assert ended.status == 2
    assert "trainer.trackers: this run was started from Python with the tracker" in ended.err
    assert "--set trainer.trackers=[] continues without it" in ended.err
    assert ended.err.count("\n") == 1

    again = Logged()
    resumed = toolwise.resume(out, trackers=[again])
    assert (again.steps, resumed.summary["stopped"], resumed.summary["steps"]) == ([2, 2], None, 2)


FAULTS = {
    "an error": lambda: 1 / 0,
    "sys.exit": lambda: (_ for _ in ()).throw(SystemExit(3)),
    "KeyboardInterrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "CancelledError": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
    "GeneratorExit": lambda: (_ for _ in ()).throw(GeneratorExit()),
}


class Faulty(toolwise.Tracker, toolwise.Callback):
    def __init__(self, fault: Function[[], Any]) -> None:
        self.fault = fault
        self.calls: list[str] = []

    def start(self, run: toolwise.RunStart) -> None:
        self.calls.append("start")
        self.fault()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append("log")
        self.fault()

    def close(self) -> None:
        self.calls.append("close")
        self.fault()

    def on_step(self, event: toolwise.StepEvent) -> toolwise.Stop | None:
        self.calls.append("on_step")
        self.fault()
        return None

    def on_end(self, event: toolwise.EndEvent) -> None:
        self.calls.append("on_end")
        self.fault()


def test_failing_ones_are_counted_and_dropped_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker, callback = Faulty(FAULTS["an error"]), Faulty(FAULTS["sys.exit"])
    overrides = [f"trainer.total_steps={MAX_FAILURES + 1}", "trainer.save_every=1"]
    with caplog.at_level(logging.WARNING):
        result = toolwise.train(
            SMALL, tasks=ROWS, out=tmp_path / "run", trackers=[tracker], callbacks=[callback], overrides=overrides
        )
    assert tracker.calls == ["start", *["log"] * MAX_FAILURES, "close"]
    assert callback.calls == ["on_step"] * MAX_FAILURES
    summary = summary_of(tmp_path / "run")
    assert result.summary["observers"] == summary["observers"]
    first, second = summary["observers"]
    assert (first["errors"], first["dropped"]) == (MAX_FAILURES + 2, True)
    assert (second["errors"], second["dropped"]) == (MAX_FAILURES, True)
    assert (summary["steps"], summary["stopped"]) == (MAX_FAILURES + 1, None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["faults/tracker"] for line in lines] == [1, 1, 1, 1]
    assert [line["faults/callback"] for line in lines] == [0, 1, 1, 1]
    said = [record.getMessage() for record in caplog.records if record.name == "toolwise.training.trackers"]
    assert len(said) == 4
    assert said[0].startswith(f"tracker {__name__}:Faulty failed in start: ZeroDivisionError: division by zero (")
    assert f"({__file__}:" in said[0]
    assert "RuntimeError: it called sys.exit(3)" in said[1]
    assert "failed 3 times in a row in log and is no longer called" in said[2]
    assert "Faulty failed 3 times and was dropped; first in on_step" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_a_failing_one_from_a_file_is_named_once_by_the_command_line(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    (tmp_path / "mine.py").write_text(
        "from toolwise import Tracker\n\nclass Bad(Tracker):\n    def log(self, step, metrics):\n        quit(1)\n"
    )
    trainer = {"total_steps": 2, "trackers": ["mine.py:Bad"]}
    ended = cli("train", make_config(tmp_path, {"trainer": trainer}), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    name = f"tracker {tmp_path / 'mine.py'}:Bad"
    assert ended.err.count(f"{name} failed in log: RuntimeError: it called sys.exit(1)") == 1
    assert f"{name} failed 3 times and was dropped; first in log: RuntimeError: it called" in ended.out
    assert summary_of(tmp_path / "run")["observers"][0]["errors"] == 3


STEP = toolwise.StepEvent(Path("run"), 1, {"a": 1.0}, (), ())


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_that_they_raise_comes_out(fault: str) -> None:
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # a run has its own handler
    try:
        tracker, callback = (ContainedObserver(Faulty(FAULTS[fault]), name) for name in ("tracker t", "callback c"))
        tracker.log(1, {})
        assert callback.on_step(STEP) is None
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (tracker.errors, callback.errors) == (1, 1)


def test_a_method_that_sometimes_fails_is_not_dropped() -> None:
    turns = iter([*([True] * (MAX_FAILURES - 1)), False] * 3)
    tracker = ContainedObserver(Faulty(lambda: 1 / 0 if next(turns) else None), "tracker t")
    for step in range(3 * MAX_FAILURES):
        tracker.log(step, {})
    assert (tracker.errors, tracker.dropped) == (3 * (MAX_FAILURES - 1), False)


def test_one_that_does_not_return_is_ended_and_no_longer_called(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[float] = []
    tracker = ContainedObserver(Faulty(lambda: calls.append(1.0) or time.sleep(60)), "tracker t", limit_s=0.02)
    for step in range(3):
        tracker.log(step, {})
    assert (len(calls), tracker.errors, tracker.dropped) == (1, 1, True)
    assert re.fullmatch(
        rf"log: took longer than trainer.observer_timeout_s = 0.02 \({__file__}:\d+\)", tracker.first_error or ""
    )
    assert "tracker t is no longer called" in caplog.text


def in_thread(function: Function[[], None]) -> None:
    """As in a notebook, where the run is not in the main thread."""
    faults: list[BaseException] = []

    def go() -> None:
        try:
            function()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if faults:
        raise faults[0]


def test_one_that_does_not_return_is_abandoned_in_other_threads(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[float] = []
    release = threading.Event()
    tracker = ContainedObserver(Faulty(lambda: calls.append(1.0) or release.wait(60)), "tracker t", limit_s=0.05)
    others = Observers([tracker], [ContainedObserver(Faulty(lambda: calls.append(2.0)), "callback c")])

    def run() -> None:
        for step in range(3):
            tracker.log(step, {})
        assert others.callbacks[0].on_step(STEP) is None
        others.close()

    before = threading.active_count()
    in_thread(run)
    assert calls == [1.0, 2.0, 1.0]  # a dropped tracker is still closed
    assert (tracker.errors, tracker.dropped) == (2, True)
    assert re.fullmatch(
        rf"log: took longer than trainer.observer_timeout_s = 0.05 \({__file__}:\d+\)", tracker.first_error or ""
    )
    assert "tracker t is no longer called" in caplog.text
    release.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_that_they_raise_comes_out_of_other_threads(fault: str) -> None:
    tracker = ContainedObserver(Faulty(FAULTS[fault]), "tracker t")

    def log() -> None:
        tracker.log(1, {})

    in_thread(log)
    assert tracker.errors == 1
    tracker.release()


def test_what_they_change_in_torch_is_restored() -> None:
    ContainedObserver(Faulty(lambda: torch.set_grad_enabled(False)), "tracker t").log(1, {})
    assert torch.is_grad_enabled()


class Wrong(toolwise.Callback):
    def on_step(self, event: toolwise.StepEvent) -> Any:
        return True

    def on_validation(self, event: toolwise.ValidationEvent) -> toolwise.Stop:
        return toolwise.Stop(" ")


def test_only_a_stop_with_a_reason_stops() -> None:
    callback = ContainedObserver(Wrong(), "callback c")
    assert callback.on_step(STEP) is None
    assert callback.first_error == (
        "on_step: TypeError: on_step returned a bool; return None, or Stop(reason) to end the run"
    )
    assert callback.on_validation(toolwise.ValidationEvent(Path("run"), 1, {}, ())) is None
    assert callback.errors == 2


class Hidden(toolwise.Callback):
    def on_step(self, event: toolwise.StepEvent) -> Any:
        return asyncio.sleep(0)


def test_a_method_that_returns_a_coroutine_is_counted() -> None:
    callback = ContainedObserver(Hidden(), "callback c")
    assert callback.on_step(STEP) is None
    assert callback.first_error == "on_step: TypeError: on_step is a coroutine; use a plain def"


class CtrlC(toolwise.Callback):
    def on_step(self, event: toolwise.StepEvent) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_a_callback_is_the_user_s(tmp_path: Path) -> None:
    result = toolwise.train(SMALL, tasks=ROWS, out=tmp_path / "run", callbacks=[CtrlC()])
    assert (result.summary["interrupted"], result.summary["stopped"], result.summary["steps"]) == (True, None, 1)
    assert result.summary["observers"][0]["errors"] == 0
    with pytest.raises(KeyboardInterrupt):
        toolwise.train(SMALL, tasks=ROWS, out=tmp_path / "twice", callbacks=[CtrlC(), CtrlC()])


class Async(toolwise.Tracker):
    async def log(self, step: int, metrics: Mapping[str, float]) -> None:  # type: ignore[override]
        return None


class Failing(toolwise.Tracker):
    def __init__(self, key: str = "") -> None:
        raise RuntimeError("no server")

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class NoLog(toolwise.Tracker):
    pass


@pytest.mark.parametrize(
    ("tracker", "said"),
    [
        (dict, "it has no start, log, close; subclass toolwise.Tracker"),
        (42, "builtins:int is not a tracker"),
        ("no_such_module:Tracker", "trainer.trackers: cannot import 'no_such_module'"),
        (f"{__file__}:Loged", "did you mean 'Logged'"),
        (f"{__file__}:Async", "log is async; use a plain def"),
        (f"{__file__}:Failing", "Failing could not be created: RuntimeError: no server"),
        ({"name": f"{__file__}:Failing", "kwargs": {"kye": 1}}, "has no option 'kye'; did you mean 'key'"),
        ({"name": f"{__file__}:Failing", "kwarg": {}}, "unknown key `kwarg`"),
        ({"name": f"{__file__}:STEP", "kwargs": {"a": 1}}, "is an object, not a class; set a where it is created"),
        (NoLog, "could not be created: TypeError: Can't instantiate abstract class NoLog"),
        (lambda: None, "is not a tracker"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_leaves_no_folder(tracker: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        toolwise.train(SMALL, tasks=ROWS, out=tmp_path / "run", trackers=[tracker])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


class Misspelt(toolwise.Callback):
    def on_setp(self, event: toolwise.StepEvent) -> None: ...


def test_a_method_that_nothing_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Misspelt: on_setp is never called; did you mean 'on_step'\?"):
        toolwise.train(SMALL, tasks=ROWS, out=tmp_path / "run", callbacks=[Misspelt])
    assert not (tmp_path / "run").exists()


def test_a_dry_run_finds_a_wrong_name_but_creates_nothing(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    config = make_config(tmp_path, {"trainer": {"trackers": ["mine.py:Lines"]}})
    ended = cli("train", config, "--dry-run")
    assert ended.status == 2
    assert "trainer.trackers: file" in ended.err
    assert [source.name for source in load_observers(TrainerConfig(trackers=[f"{__file__}:Failing"]))]


def test_a_resumed_run_may_have_others() -> None:
    before = RunConfig.model_validate({"trainer": {"trackers": ["a:B"]}})
    now = RunConfig.model_validate(
        {"trainer": {"trackers": [{"name": "a:C", "kwargs": {"x": 1}}], "callbacks": ["a:D"]}}
    )
    changes = changes_between(before, now)
    assert changes
    assert all(change.allowed for change in changes)


def test_a_class_is_recorded_by_its_reference(tmp_path: Path) -> None:
    inputs = gather_inputs(RunConfig(), tmp_path, trackers=[Logged, "a:B"], callbacks=[Seen(), Wrong()])
    assert inputs.recorded.trainer.trackers == [f"{__file__}:Logged", "a:B"]
    assert inputs.recorded.trainer.callbacks == [
        f"{__file__}:Seen",
        f"given in Python: the callback {__name__}:Wrong",
    ]
    assert len(inputs.notes) == 1
