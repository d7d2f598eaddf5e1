"""Processes that rewards, programs and tools try to leave behind: none survives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import abuse_processes as cases
import pytest
from unprivileged import NOBODY, python_for_anybody, readable_copy

from toolwise.sandbox import ProgramSandbox
from toolwise.sandbox.layers.bubblewrap import unavailable_reason
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool
from toolwise.tools.isolation.tool_worker import ToolDied, ToolFault

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


USUAL = {"env_i_setsid", "another_comm", "clone_parent", "clone3_parent", "no_folder", "hops_between_sessions", "crowd"}
USUAL |= {"respawns", "traced", "stopped", "and_exits", "stops_the_supervisor", "kills_the_supervisor", "deep_chain"}
USUAL_ELSEWHERE = {"env_i_setsid", "clone_parent", "hops_between_sessions", "and_exits"}
"""Run in every build, in the weakest tier and in others; the rest are `long`."""


def _gone(*words: str, within_s: float = 10.0) -> list[str]:
    """The processes with one of the words that are still alive after a while."""
    until = time.monotonic() + within_s
    while (alive := cases.alive_with(*words)) and time.monotonic() < until:
        time.sleep(0.05)
    return list(alive)


@pytest.fixture(scope="module")
def ground(request: pytest.FixtureRequest) -> Iterator[Any]:
    with (
        tempfile.TemporaryDirectory(prefix="toolwise-abuse-") as folder,
        cases.ground_in(Path(folder), request.param) as ground,
    ):
        if not ground.sandbox.report().complete:
            pytest.skip(ground.sandbox.describe())
        yield ground


def _marks(case: Any, tier: str) -> list[pytest.MarkDecorator]:
    usual = case.name in (USUAL if tier == "basic" else USUAL_ELSEWHERE)
    return [*([] if usual else [pytest.mark.long]), *([pytest.mark.namespaced] if tier == "namespaced" else [])]


@pytest.mark.parametrize(
    ("ground", "case"),
    [
        pytest.param(tier, case, marks=_marks(case, tier), id=f"{tier}-{case.name}")
        for tier in ("basic", "standard", "namespaced")
        for case in cases.DAEMONS
        if tier in case.tiers
    ],
    indirect=["ground"],
)
def test_nothing_outlives_a_reward(ground: Any, case: Any) -> None:
    outcome = cases.asdict(ground.run(case))
    assert not cases.wrong_with(case, outcome), outcome


def _as_nobody(tier: str) -> dict[str, Any]:
    python = python_for_anybody() if os.getuid() == 0 else None
    if python is None:
        pytest.skip("nobody else can be become here, or may run this Python")
    with tempfile.TemporaryDirectory(prefix="toolwise-nobody-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = readable_copy(folder, "abuse_processes")
        run = folder / "run.py"
        ground = folder / "ground"
        ground.mkdir()
        os.chown(ground, NOBODY, NOBODY)
        done = subprocess.run(
            [python, str(run), str(ground), tier],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env=environment,
            cwd=ground,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in done.stdout.splitlines()]
    if "missing" in lines[0]:
        pytest.skip(lines[0]["missing"])
    assert {line["uid"] for line in lines} == {NOBODY}
    return {line["name"]: line["outcome"] for line in lines}


@pytest.mark.long
@pytest.mark.parametrize("tier", ["basic", "standard", pytest.param("namespaced", marks=pytest.mark.namespaced)])
def test_nothing_outlives_a_reward_of_a_user_without_privileges(tier: str) -> None:
    outcomes = _as_nobody(tier)
    assert len(outcomes) > 35
    wrong = {name: cases.wrong_with(cases.BY_NAME[name], outcome) for name, outcome in outcomes.items()}
    assert not {name: what for name, what in wrong.items() if what}


PROGRAM_TIERS = ["standard", pytest.param("namespaced", marks=pytest.mark.namespaced)]


@pytest.mark.parametrize("tier", PROGRAM_TIERS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if number < 3 or name == "respawns" else pytest.mark.long)
     for number, name in enumerate(cases.SHELL)],
)  # fmt: skip
def test_nothing_outlives_a_shell_program(name: str, tier: Any) -> None:
    if tier == "namespaced" and unavailable_reason():
        pytest.skip(unavailable_reason())
    sandbox = ProgramSandbox("shell", tier, permissions=["subprocess"], timeout_s=2.0)
    folder = sandbox.open_folder()
    word = cases.new_name()
    try:
        result = asyncio.run(sandbox.run(cases.SHELL[name].replace("NAME", word), folder))
        assert cases.alive_with(word, str(folder.path)) == []
        ends = {"loops": "timeout", "kills_itself": "died", "exits_at_once": "exit"}
        assert result.kind == ends.get(name, "ok"), result
        least = {"crowd": 12, "respawns": 2, "loops": 0 if tier == "namespaced" else 1}.get(name, 1)
        assert result.left_running >= least, result
    finally:
        asyncio.run(sandbox.close_folder(folder))
        sandbox.close()


@pytest.mark.parametrize("name", ["env_i_setsid", "clone_parent", "hops_between_sessions", "another_comm", "crowd"])
def test_nothing_outlives_a_python_program_in_the_basic_tier(name: str) -> None:
    sandbox = ProgramSandbox("python", "basic", timeout_s=4.0)
    folder = sandbox.open_folder()
    word = cases.new_name()
    try:
        text = f"{cases.BY_NAME[name].source()}\nattack({word!r})\n"
        result = asyncio.run(sandbox.run(text, folder))
        assert cases.alive_with(word, str(folder.path)) == []
        assert result.kind == "ok", result
        assert result.left_running >= cases.BY_NAME[name].left
    finally:
        asyncio.run(sandbox.close_folder(folder))
        sandbox.close()


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in cases.DAEMONS if "basic" in case.tiers], ids=lambda case: case.name)
def test_nothing_outlives_a_tools_worker(case: Any, tmp_path: Path) -> None:
    check_tool(case, tmp_path)


def test_nothing_outlives_the_worker_of_a_tool_that_leaves_daemons(tmp_path: Path) -> None:
    for name in ("env_i_setsid", "another_comm", "clone_parent", "hops_between_sessions", "and_exits"):
        check_tool(cases.BY_NAME[name], tmp_path)


def check_tool(case: Any, folder: Path) -> None:
    """Call it once, then end its worker."""
    file, word, pool = folder / f"tool_{case.name}.py", cases.new_name(), ToolPool(limit=1)
    source = case.source().replace("def attack(name):", "def attack(name: str) -> str:\n    os.chdir(HERE)", 1)
    file.write_text(f"{source}\nHERE = {str(folder)!r}\n")
    work = folder / f"work_{case.name}"
    work.mkdir()
    file.write_text(f"{source}\nHERE = {str(work)!r}\n")
    target = ObjectRef(ModuleRef(None, str(file)), "attack")

    async def call() -> None:
        with pytest.raises((ToolDied, TimeoutError)) if case.kind in ("died", "timeout") else _anything():
            await asyncio.wait_for(pool.run(target, {"name": word}), 5)

    try:
        asyncio.run(call())
    finally:
        pool.close()
    assert _gone(word, str(work), within_s=5.0) == []


class _anything:  # noqa: N801
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, fault: Any, trace: Any) -> bool:
        return isinstance(fault, ToolFault | ToolDied | TimeoutError)


TRAINER = """
import asyncio, logging, sys, threading
from pathlib import Path
from toolwise.sandbox import ProgramSandbox, Sandbox
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool
logging.disable(50)
what, file, word, note = sys.argv[1:]
tier, _, kind = what.partition(" ")
permissions = [] if tier == "basic" else ["subprocess"]
if kind == "reward":
    sandbox = Sandbox(tier, timeout_s=100, permissions=permissions)
    work = lambda: sandbox.evaluate(f"{file}:f", [{"role": "user", "content": "x"}], word)
elif kind == "tool":
    work = lambda: asyncio.run(ToolPool().run(ObjectRef(ModuleRef(None, file), "attack"), {"name": word}))
else:
    programs = ProgramSandbox("shell", tier, permissions=permissions, timeout_s=100)
    text = f"env -i setsid sleep {word} & (setsid sleep {word} &) ; while :; do sleep {word}; done"
    work = lambda: asyncio.run(programs.run(text, programs.open_folder()))
threading.Thread(target=work, daemon=True).start()
Path(note).write_text("begun")
threading.Event().wait()
"""
WITH_TRAINER = ["basic reward", "standard reward", "standard program", "none tool"]
WITH_TRAINER_IN_NAMESPACES = ["namespaced reward", "namespaced program"]


@pytest.mark.parametrize(
    "what", [*WITH_TRAINER, *(pytest.param(what, marks=pytest.mark.namespaced) for what in WITH_TRAINER_IN_NAMESPACES)]
)
def test_all_ends_with_a_trainer_that_is_killed(what: str, tmp_path: Path) -> None:
    if "namespaced" in what and unavailable_reason():
        pytest.skip(unavailable_reason())
    (tmp_path / "trainer.py").write_text(TRAINER)
    body = "daemon(name, lambda: os.chdir('/'), env={}); sh('env -i setsid sleep NAME &', name); sleep(name)"
    source = cases.Case("daemons", body).source().replace("def attack(name):", "def attack(name: str) -> str:")
    (tmp_path / "r.py").write_text(source)
    word, note = cases.new_name(), tmp_path / "note"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(tmp_path / "trainer.py"), what, str(tmp_path / "r.py"), word, str(note)]
    trainer = subprocess.Popen(command, env=environment)
    try:
        until = time.monotonic() + 60
        while sum("sleep" in line for line in cases.alive_with(word)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert sum("sleep" in line for line in cases.alive_with(word)) >= 3
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert _gone(word) == []


def test_there_are_enough_cases() -> None:
    assert len(cases.DAEMONS) + len(cases.SHELL) >= 60
    assert len(cases.BY_NAME) == len(cases.DAEMONS)
    assert set(cases.BY_NAME) >= USUAL
