"""Shared by all tests: the command line in this process, tiny configurations, and one tiny run."""

from __future__ import annotations

import fcntl
import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w
from hypothesis import settings

# As many examples as fit a build on two cores; HYPOTHESIS_PROFILE=thorough tries more.
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Some virtual machines report Intel's AMX without its tile palette: bfloat16 products there end the process with an
# illegal instruction. Training refuses bfloat16 on a CPU, tests compute with it. Worker processes inherit this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

gc.disable()  # until all is imported and collected: it would look through every module again and again


WHOLE_RUNS = {"end_to_end", "training", "cli", "checks", "agent", "test_api.py"}
"""Folders whose tests train, evaluate or check from beginning to end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs, which take longest, come first, so that no worker is left with one at the end: see the Makefile."""
    tests = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in WHOLE_RUNS)


def pytest_collection_finish() -> None:
    """Imported modules are never garbage: without them a full collection takes milliseconds, not half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_disk_syncs() -> Iterator[None]:
    """A sync waits for the disk, dozens of times a run. No test cuts the power: those of crashes simulate a disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield


WITH_FIGURES = {"view", "frontier", "docs", "demo"}
"""Folders whose tests draw the figures of a report; elsewhere drawing takes longer than the two steps of a tiny run."""


@pytest.fixture(autouse=True)
def _no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.relative_to(Path(__file__).parent).parts[0] not in WITH_FIGURES:
        import toolwise.view.report as report

        for name in ("render_curves", "render_routing", "render_thinking", "render_frontier"):
            monkeypatch.setattr(report, name, lambda *_: PIXEL)


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010804000000b51c0c02"
    "0000000b4944415478da6364f80f00010501012718e3660000000049454e44ae426082"
)
"""The smallest PNG."""


TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"path": "builtin:small", "device": "cpu"},
    "data": {"train": "train.jsonl", "val": "heldout.jsonl", "batch_size": 2},
    "tools": ["calculator", "search"],
    "rollout": {"n": 2, "max_new_tokens": 32},
    "multi_turn": {"max_turns": 3},
    "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"trusted": ["toolwise.demo.reward"]}},
    "actor": {"lr": 1e-4},
    "trainer": {"total_steps": 2, "save_every": 1},
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str


Cli = Callable[..., Outcome]
MakeConfig = Callable[..., Path]


@pytest.fixture(scope="session")
def cli() -> Cli:
    """`cli("train", path, …)`: what the real command line does with these arguments, without the wait for torch."""
    import typer.main

    build, built = typer.main.get_command, dict[tuple[object, ...], Any]()

    def build_once(app: typer.Typer) -> Any:
        """All commands with all their options are built for each command that is run."""
        commands = (app, *app.registered_commands)
        if commands not in built:
            built[commands] = build(app)
        return built[commands]

    def run(*arguments: object) -> Outcome:
        from toolwise.cli import main

        out, err, status = io.StringIO(), io.StringIO(), 0
        with ExitStack() as stack:
            # What other tests of this process left lying about would complain on this command's stderr when swept up.
            gc.disable()
            stack.callback(gc.enable)
            # Without pytest's own handlers: what is logged belongs on stderr, where each line counts.
            stack.enter_context(patch.object(logging.getLogger(), "handlers", []))
            stack.enter_context(patch.object(typer.main, "get_command", build_once))
            stack.enter_context(patch.object(sys, "argv", ["toolwise", *map(str, arguments)]))
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            try:
                main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:
                traceback.print_exc()
                status = 1
        return Outcome(status, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """`make_config(folder, {"rollout": {"n": 1}})`: a tiny run's configuration and its tasks, in `folder`."""

    def make(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
        from toolwise.demo.tasks import write_rows

        write_rows(folder / "train.jsonl", 8, seed=0, split="train")
        write_rows(folder / "heldout.jsonl", 4, seed=0, split="heldout")
        settings = dict(TINY)
        for name, value in (changes or {}).items():
            settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
        path = folder / "run.toml"
        path.write_text(tomli_w.dumps(settings), encoding="utf-8")
        return path

    return make


@pytest.fixture
def all_files_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task files are converted, however small they are."""
    monkeypatch.setattr("toolwise.data.sources.SMALL_BYTES", 0)
    monkeypatch.setattr("toolwise.data.sources.SMALL_ROWS", 0)
    monkeypatch.setattr("toolwise.data.conversion.BATCH_ROWS", 3)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, cli: Cli, make_config: MakeConfig) -> Path:
    """The folder of a deterministic run of two steps; its configuration is run.toml beside it. Copy it to change it.

    The processes of one session share it: the first that needs it makes it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "stdout.txt").exists():
            ended = cli("train", make_config(folder, {"deterministic": True}), "--out", folder / "run")
            assert ended.status == 0, ended.err
            (folder / "stdout.txt").write_text(ended.out, encoding="utf-8")
    return folder / "run"
