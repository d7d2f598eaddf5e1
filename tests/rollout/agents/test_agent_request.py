"""Rollouts of outside agents in real processes: what they return, raise, leave behind, and how they end."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import DECISION, PreparedPolicy

from toolwise.concurrency import deadlines
from toolwise.config.agent import AgentConfig
from toolwise.errors import ConfigError, PolicyError
from toolwise.rollout.agents.agent_pool import AgentPool
from toolwise.rollout.agents.agent_process import AgentDiedError, AgentLoadError, AgentProcess
from toolwise.rollout.agents.agent_request import UNUSED_REWARD, AgentScheduler, OutsideAgent
from toolwise.serve.gateway.gateway_server import Gateway
from toolwise.types import Rollout, StopReason

CODE = """
import asyncio, json, os, subprocess, sys, threading, time, urllib.request
import sibling

def ask(base_url, api_key, messages):
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]

def answers(task, base_url, api_key):
    print("working on", task["task_id"])
    messages = task["prompt"] + [ask(base_url, api_key, task["prompt"]), {"role": "user", "content": "Sure?"}]
    ask(base_url, api_key, messages)
    return {"score": 0.5, "metrics": {"pid": os.getpid(), "helped": sibling.HELP}}

async def is_async(task, base_url, api_key):
    await asyncio.to_thread(ask, base_url, api_key, task["prompt"])
    return 1

def raises(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    raise ValueError("no such city")

def exits(task, base_url, api_key):
    sys.exit(3)

def dies(task, base_url, api_key):
    os._exit(7)

def hangs(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    time.sleep(600)

def silent(task, base_url, api_key):
    return 1.0

def wrong(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    return {"score": "high"}

def unsendable(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    return {"score": 1, "reason": object()}

def endless(task, base_url, api_key):
    while True:
        ask(base_url, api_key, task["prompt"])

def forks(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    os.fork()
    return os.getpid()

def leaves_a_process(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    return os.getpid()

def two(task, base_url):
    return 1.0

number = 3

def leaks(task, base_url, api_key):
    ask(base_url, api_key, task["prompt"])
    threading.Thread(target=lambda: (time.sleep(0.1), ask(base_url, api_key, task["prompt"])), daemon=True).start()
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "mine.py").write_text(CODE)
    (folder / "sibling.py").write_text("HELP = 1")
    (folder / "broken.py").write_text("def run(task, base_url, api_key): ...\n1 / 0")
    (folder / "slow.py").write_text("import time\ntime.sleep(1.2)\nfrom mine import is_async as run")
    (folder / "once.py").write_text(
        textwrap.dedent(
            """
            import json, os, sys
            sys.path.insert(0, os.path.dirname(__file__))
            import mine
            task = json.load(sys.stdin)
            mine.ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["prompt"])
            print("debug output")
            if len(sys.argv) > 1:
                sys.exit(int(sys.argv[1]))
            print(json.dumps({"score": 0.25}))
            """
        )
    )
    return folder


RollOut = Callable[..., list[Rollout]]


@pytest.fixture
def roll_out(folder: Path) -> Iterator[RollOut]:
    agents: list[OutsideAgent] = []

    def run(name: str, *replies: Any, n: int = 1, wait_s: float = 0.0, **options: Any) -> list[Rollout]:
        settings = options.pop("agent", {"run": f"{folder}/mine.py:{name}"})
        agent = OutsideAgent(AgentPool(AgentConfig(**settings)), Gateway())
        agents.append(agent)
        policy: Any = PreparedPolicy(*replies)
        options = {"max_concurrent": 1, "deadline_s": 20.0, **options}
        scheduler = AgentScheduler(policy, {}, agent=agent, session_policy=policy, **options)

        async def work() -> list[Rollout]:
            rollouts = await scheduler.roll_out([replace(DECISION, n=n)])
            await asyncio.sleep(wait_s)
            return rollouts

        return deadlines.run(work())

    yield run
    for agent in agents:
        agent.close()
        assert not any(map(is_running, agent.pool.pids()))


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_an_agent_is_a_rollout_and_its_process_stays_warm(roll_out: RollOut) -> None:
    rollouts = roll_out("answers", "a", "b", "c", "d", n=2)
    assert [r.rollout_id for r in rollouts] == ["g/0", "g/1"]
    assert all(r.stop_reason is StopReason.ANSWERED and r.trainable for r in rollouts)
    results = [r.result for r in rollouts]
    assert [result.score for result in results if result] == [0.5, 0.5]
    pids = {result.metrics["pid"].score for result in results if result}
    assert len(pids) == 1
    assert [m.content for m in rollouts[0].messages[1:]] == ["a", "Sure?", "b"]


def test_an_async_function(roll_out: RollOut) -> None:
    (rollout,) = roll_out("is_async", "a")
    assert rollout.result is not None
    assert rollout.result.score == 1.0


@pytest.mark.parametrize(
    ("name", "reason", "fault"),
    [
        ("raises", StopReason.ENV_FAULT, "agent.run failed: ValueError: no such city (mine.py:23)"),
        ("exits", StopReason.ENV_FAULT, "agent.run failed: SystemExit: 3 (mine.py:26)"),
        ("silent", StopReason.ENV_FAULT, "the agent made no call of the model"),
        ("wrong", StopReason.ENV_FAULT, "run returned no reward: "),
        (
            "unsendable",
            StopReason.ENV_FAULT,
            "agent.run failed: TypeError: Object of type object",
        ),
        ("nothing", StopReason.ENV_FAULT, "does not load: AttributeError"),
    ],
)
def test_faults_of_an_agent_are_typed(roll_out: RollOut, name: str, reason: StopReason, fault: str) -> None:
    (rollout,) = roll_out(name, "a")
    assert rollout.stop_reason is reason
    assert not rollout.trainable
    assert fault in (rollout.fault or "")


def test_an_agent_that_dies_is_replaced(roll_out: RollOut) -> None:
    rollouts = roll_out("dies", n=2)
    assert [r.infrastructure_fault for r in rollouts] == [True, True]
    assert rollouts[0].fault == "the agent's process exited with status 7"


def test_loading_an_agent_does_not_count_towards_its_deadline(roll_out: RollOut, folder: Path) -> None:
    (rollout,) = roll_out("", "a", deadline_s=1.1, agent={"run": f"{folder}/slow.py:run"})
    assert rollout.stop_reason is StopReason.ANSWERED


def test_an_interrupted_run_leaves_no_process(folder: Path) -> None:
    agent = OutsideAgent(AgentPool(AgentConfig(run=f"{folder}/mine.py:hangs")), Gateway())
    policy: Any = PreparedPolicy("a", "b")
    scheduler = AgentScheduler(policy, {}, agent=agent, session_policy=policy)

    async def work() -> list[int]:
        rolling = asyncio.ensure_future(scheduler.roll_out([replace(DECISION, n=2)]))
        while len(policy.asked) < 2:  # noqa: ASYNC110 (other processes have no event)
            await asyncio.sleep(0.01)
        pids = agent.pool.pids()
        rolling.cancel()
        await asyncio.wait({rolling})
        return pids

    pids = deadlines.run(work())
    agent.close()
    until = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_an_agent_that_hangs_is_killed_at_its_deadline(roll_out: RollOut) -> None:
    (rollout,) = roll_out("hangs", "a", deadline_s=1.0)
    assert rollout.stop_reason is StopReason.DEADLINE
    assert len(rollout.steps) == 1


def test_limits_and_faults_of_the_model_are_no_fault_of_the_agent(roll_out: RollOut) -> None:
    (rollout,) = roll_out("endless", "a", "b", max_calls=2)
    assert (rollout.stop_reason, len(rollout.steps)) == (StopReason.MAX_STEPS, 2)
    assert rollout.trainable
    (rollout,) = roll_out("raises", PolicyError("the engine is down"))
    assert rollout.stop_reason is StopReason.POLICY_FAULT
    assert "the engine is down" in (rollout.fault or "")


def test_a_call_after_the_end_is_refused_and_counted(roll_out: RollOut) -> None:
    before = deadlines.abandoned_counts().get("a call of an agent", 0)
    (rollout,) = roll_out("leaks", "a", "b", wait_s=0.6)
    assert len(rollout.steps) == 1
    assert deadlines.abandoned_counts()["a call of an agent"] == before + 1


def test_a_command_runs_once_for_each_task(roll_out: RollOut, folder: Path) -> None:
    command = {"command": [sys.executable, f"{folder}/once.py"]}
    rollouts = roll_out("", "a", "b", n=2, agent=command)
    assert [r.result.score for r in rollouts if r.result] == [0.25, 0.25]
    (failed,) = roll_out("", "a", agent={"command": [sys.executable, f"{folder}/once.py", "5"]})
    assert failed.fault == "the agent's command exited with status 5"
    (missing,) = roll_out("", "a", agent={"command": ["no-such-program"]})
    assert missing.fault == "the agent's command exited with status 127"


def test_another_interpreter_needs_nothing_of_ours(roll_out: RollOut, folder: Path) -> None:
    base = os.path.join(sys.base_prefix, "bin", f"python{sys.version_info.major}")
    (rollout,) = roll_out("", "a", "b", agent={"run": f"{folder}/mine.py:answers", "python": base})
    assert rollout.stop_reason is StopReason.ANSWERED


def test_a_command_may_print_before_it_reads_or_not_read_at_all(roll_out: RollOut) -> None:
    prints = "import os, sys; os.write(1, b'x' * 1_000_000 + b'\\n'); sys.stdin.read(); print(1)"
    task = {"prompt": "x" * 1_000_000}
    for code in (prints, "print(1)"):
        pool = AgentPool(AgentConfig(command=[sys.executable, "-S", "-c", code]))
        assert deadlines.run(asyncio.wait_for(pool.run(task, "", ""), 10)) == 1


def test_what_a_task_leaves_running_ends_with_its_process(roll_out: RollOut) -> None:
    rollouts = roll_out("leaves_a_process", "a", "b", n=2)
    pids = [int(r.result.score) for r in rollouts if r.result]
    assert len(set(pids)) == 2


def test_a_child_that_returns_too_does_not_spoil_the_next_task(roll_out: RollOut) -> None:
    rollouts = roll_out("forks", "a", "b", "c", n=3)
    assert [r.stop_reason for r in rollouts] == [StopReason.ANSWERED] * 3
    assert not any(r.fault for r in rollouts)


def test_a_process_whose_caller_has_gone_is_ended(folder: Path) -> None:
    pool = AgentPool(AgentConfig(run=f"{folder}/mine.py:silent"))
    started: list[AgentProcess] = []

    class Slow(AgentProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            leave.set()
            gone.wait(5)

    leave, gone = threading.Event(), threading.Event()

    async def work() -> None:
        call = asyncio.ensure_future(pool.run({}, "", ""))
        while not leave.is_set():  # noqa: ASYNC110 (set by a thread)
            await asyncio.sleep(0.002)
        call.cancel()
        await asyncio.wait({call})
        gone.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolwise.rollout.agents.agent_pool.AgentProcess", Slow)
        deadlines.run(work())
    (process,) = started
    process.thread.join(5)
    assert not process.alive
    assert pool.pids() == []


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("mine.py:nothing", r"does not load: AttributeError: .*mine\.py has no nothing"),
        ("mine.py:number", "number is not a function but int"),
        ("mine.py:two", r"two\(task, base_url\) must take \(task, base_url, api_key\)"),
        ("none.py:run", r"there is no file .*none\.py"),
        ("broken.py:run", r"ZeroDivisionError: division by zero \(broken\.py:2\)"),
    ],
)
def test_an_agent_that_does_not_load_stops_the_run_before_it_starts(folder: Path, target: str, cause: str) -> None:
    pool = AgentPool(AgentConfig(run=f"{folder}/{target}"))
    with pytest.raises(ConfigError, match=cause) as fault:
        pool.check()
    assert "\n" not in str(fault.value)
    assert pool.pids() == []


def test_one_failed_import_does_not_fail_later_processes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    file.write_text("def run(task, base_url, api_key): import os; os._exit(0)")
    pool = AgentPool(AgentConfig(run=f"{file}:run"))

    async def outcome() -> Any:
        try:
            return await pool.run({}, "", "")
        except AgentDiedError as fault:
            return type(fault)

    assert deadlines.run(outcome()) is AgentDiedError
    file.write_text("1 / 0")
    assert deadlines.run(outcome()) is AgentLoadError
    file.write_text("def run(task, base_url, api_key): return 0.5")
    assert deadlines.run(outcome()) == 0.5
    pool.close()


def test_a_reward_that_is_not_used_is_said_once(roll_out: RollOut, caplog: pytest.LogCaptureFixture) -> None:
    roll_out("is_async", "a", "b", n=2, uses_reward=False)
    assert [r.message for r in caplog.records].count(UNUSED_REWARD) == 1
