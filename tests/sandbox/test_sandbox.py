"""The public API of `Sandbox`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from process_state import is_running

from toolwise.errors import RewardError, ToolwiseError
from toolwise.messages import Message
from toolwise.sandbox import KINDS, Sandbox, SandboxError

MESSAGES = [Message(role="user", content="2+2?"), Message(role="assistant", content="4")]
REWARDS = """
import os, threading, time
from toolwise import reward_function
from toolwise.types import EvaluateResult, StepOutput

@reward_function
def right(messages, ground_truth):
    return float(messages[-1].content == str(ground_truth))

@reward_function
def steps(messages, ground_truth, weight=1.0):
    return EvaluateResult(score=weight, reason="so", step_outputs=[StepOutput(step_index=0, base_reward=0.5)])

@reward_function
async def later(messages, ground_truth):
    import asyncio
    await asyncio.sleep(0.01)
    return 0.5

@reward_function
def all_of_them(rollouts_messages, ground_truths, bonus=0.0):
    return [float(m[-1].content == str(t)) + bonus for m, t in zip(rollouts_messages, ground_truths)]

def short_batch(rollouts_messages, ground_truths):
    return [1.0]

def batch_dies(rollouts_messages, ground_truths):
    os._exit(3)

def as_told(messages, ground_truth):
    if ground_truth == "die": os._exit(7)
    if ground_truth == "loop":
        while True: pass
    if ground_truth == "raise": raise ValueError("as told")
    if ground_truth == "pid": return float(os.getpid())
    if ground_truth == "sleep": time.sleep(0.3)
    return 1.0

def says_and_fails(messages, ground_truth):
    print("a word before the end")
    raise ValueError("now")

def ten(messages, ground_truth):
    return 10.0

def leaves_files(messages, ground_truth):
    found = len(os.listdir("."))
    os.makedirs("a/b")
    os.symlink("/", "a/c")
    open("d", "w").write("x")
    return float(found)

def keeps_nameless(messages, ground_truth):
    keeps_nameless.file = open("x", "wb")
    keeps_nameless.file.write(bytes(100_000))
    keeps_nameless.file.flush()
    os.unlink("x")
    return float(os.getpid())
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return lambda name: f"{path}:{name}"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=1.0, memory_mb=128, workers=2) as sandbox:
        yield sandbox


def test_a_pointwise_function_scores_a_rollout(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    assert sandbox.evaluate(rewards("right"), MESSAGES, 4).score == 1.0
    assert sandbox.evaluate(rewards("right"), [m.to_openai() for m in MESSAGES], 5).score == 0.0


def test_results_come_back_whole(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    result = sandbox.evaluate(rewards("steps"), MESSAGES, None, weight=0.25)
    assert (result.score, result.reason) == (0.25, "so")
    assert result.step_outputs is not None
    assert result.step_outputs[0].base_reward == 0.5


def test_an_argument_that_the_function_does_not_take_is_an_exception(
    sandbox: Sandbox, rewards: Callable[[str], str]
) -> None:
    result = sandbox.evaluate(rewards("right"), MESSAGES, 4, colour="red")
    assert result.error is not None
    assert result.error.kind == "exception"
    assert "colour" in result.error.message


def test_an_async_function_is_awaited(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    assert sandbox.evaluate(rewards("later"), MESSAGES, None).score == 0.5


def test_a_batch_function_gets_all_rollouts_at_once(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    results = sandbox.evaluate_batch(rewards("all_of_them"), [MESSAGES] * 3, [4, 5, 4], bonus=1.0)
    assert [r.score for r in results] == [2.0, 1.0, 2.0]
    assert sandbox.evaluate(rewards("all_of_them"), MESSAGES, 4).score == 1.0


def test_a_pointwise_function_over_many_keeps_their_order(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    results = sandbox.evaluate_batch(rewards("right"), [MESSAGES] * 100, [4 if i % 3 else 0 for i in range(100)])
    assert [r.score for r in results] == [1.0 if i % 3 else 0.0 for i in range(100)]


def test_no_rollouts_no_results(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    assert sandbox.evaluate_batch(rewards("right"), [], []) == []


def test_ground_truths_must_match_rollouts(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    with pytest.raises(SandboxError, match="2 rollouts but 1"):
        sandbox.evaluate_batch(rewards("right"), [MESSAGES] * 2, [4])


def test_a_batch_of_the_wrong_length_invalidates_the_batch(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    results = sandbox.evaluate_batch(rewards("short_batch"), [MESSAGES] * 3, [1, 2, 3])
    assert [r.error.kind for r in results if r.error] == ["wrong_length"] * 3


def test_a_batch_that_dies_invalidates_the_batch(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    results = sandbox.evaluate_batch(rewards("batch_dies"), [MESSAGES] * 3, [1, 2, 3])
    assert [r.error.kind for r in results if r.error] == ["died"] * 3
    assert "status 3" in str(results[0].error)


def test_only_the_culprit_is_blamed(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    orders = ["", "", "die", "", "raise", "", "die", "", "", ""]
    results = sandbox.evaluate_batch(rewards("as_told"), [MESSAGES] * len(orders), orders)
    kinds = [r.error.kind if r.error else "ok" for r in results]
    assert kinds == ["ok", "ok", "died", "ok", "exception", "ok", "died", "ok", "ok", "ok"]


def test_an_infinite_loop_costs_the_others_only_time(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    results = sandbox.evaluate_batch(rewards("as_told"), [MESSAGES] * 6, ["", "loop", "", "", "", ""])
    assert [r.error.kind if r.error else "ok" for r in results] == ["ok", "timeout", "ok", "ok", "ok", "ok"]


def test_a_clean_worker_is_used_again_and_another_is_not(rewards: Callable[[str], str]) -> None:
    with Sandbox(timeout_s=2.0, workers=1) as sandbox:
        first = sandbox.evaluate(rewards("as_told"), MESSAGES, "pid").score
        assert sandbox.evaluate(rewards("as_told"), MESSAGES, "pid").score == first
        sandbox.evaluate(rewards("as_told"), MESSAGES, "raise")
        assert sandbox.evaluate(rewards("as_told"), MESSAGES, "pid").score != first


def test_a_worker_is_replaced_after_max_calls(rewards: Callable[[str], str]) -> None:
    with Sandbox(timeout_s=2.0, workers=1, max_calls=2) as sandbox:
        pids = [sandbox.evaluate(rewards("as_told"), MESSAGES, "pid").score for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


@pytest.mark.parametrize("own_disk", [True, False])
def test_a_call_finds_nothing_of_those_before_it(rewards: Callable[[str], str], own_disk: bool) -> None:
    with Sandbox(workers=1) as one:
        one._pool._plan = replace(one._pool._plan, own_disk=own_disk)
        results = one.evaluate_batch(rewards("leaves_files"), [MESSAGES] * 12, [None] * 12)
        results.append(one.evaluate(rewards("leaves_files"), MESSAGES, None))
        assert [result.score for result in results] == [0.0] * 13
        assert len(one.pids()) == 2  # one worker served them all; the other is the spare


@pytest.mark.skipif(sys.platform != "linux", reason="files without names are found in /proc")
@pytest.mark.parametrize("own_disk", [True, False])
def test_a_worker_that_keeps_a_file_without_a_name_is_replaced(rewards: Callable[[str], str], own_disk: bool) -> None:
    with Sandbox(workers=1) as one:
        one._pool._plan = replace(one._pool._plan, own_disk=own_disk)
        scores = {one.evaluate(rewards("keeps_nameless"), MESSAGES, None).score for _ in range(3)}
        assert len(scores) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_workers_that_come_and_go_leave_no_descriptors(rewards: Callable[[str], str]) -> None:
    with Sandbox(workers=1) as one:
        counts = []
        for _ in range(4):
            one.evaluate(rewards("as_told"), MESSAGES, "raise")
            one.evaluate(rewards("as_told"), MESSAGES, "fine")
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[-1] == counts[1]


def test_output_is_shown_with_the_fault(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    error = sandbox.evaluate(rewards("says_and_fails"), MESSAGES, None).error
    assert error is not None
    assert "a word before the end" in error.traceback
    assert "in says_and_fails" in error.traceback


def test_a_score_out_of_range_is_a_fault(rewards: Callable[[str], str]) -> None:
    with Sandbox(timeout_s=2.0, score_range=(0.0, 1.0)) as sandbox:
        error = sandbox.evaluate(rewards("ten"), MESSAGES, None).error
    assert error is not None
    assert error.kind == "out_of_range"


@pytest.mark.parametrize("reference", ["nowhere.py:f", "no_such_module_here:f", "", ":", "json", "math:f"])
def test_a_reference_to_nothing_is_an_import_fault(sandbox: Sandbox, reference: str) -> None:
    error = sandbox.evaluate(reference, MESSAGES, None).error
    assert error is not None
    assert error.kind == "import"


def test_arguments_that_are_not_json_are_a_fault(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    error = sandbox.evaluate(rewards("right"), MESSAGES, object()).error
    assert error is not None
    assert error.kind == "bad_type"


def test_lone_surrogates_reach_the_function(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    assert sandbox.evaluate(rewards("as_told"), MESSAGES, "\ud800").score == 1.0


def test_a_function_object_is_found_by_its_file(sandbox: Sandbox) -> None:
    from toolwise.demo.reward import small_world_reward

    assert sandbox.evaluate(small_world_reward, MESSAGES, "4").has_valid_score
    with pytest.raises(RewardError, match="lambda"):
        sandbox.evaluate(lambda m, t: 1.0, MESSAGES, None)


def test_a_package_sees_itself_and_not_its_neighbours(
    tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "graders_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("VALUE = 0.75")
    (package / "main.py").write_text(
        "from graders_of_mine.parts import VALUE\n"
        "def f(messages, truth): return VALUE\n"
        "def g(messages, truth): return open(truth).read() and 1.0\n"
    )
    (tmp_path / "secret").write_text("x")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sandbox.evaluate("graders_of_mine.main:f", MESSAGES, None).score == 0.75
    error = sandbox.evaluate("graders_of_mine.main:g", MESSAGES, str(tmp_path / "secret")).error
    assert error is not None
    assert error.kind == "denied"
    assert "graders_of_mine" not in sys.modules


def test_a_file_with_one_decorated_function_needs_no_name(tmp_path: Path, sandbox: Sandbox) -> None:
    path = tmp_path / "one.py"
    path.write_text("from toolwise import reward_function\n@reward_function\ndef f(messages, truth): return 0.5\n")
    assert sandbox.evaluate(str(path), MESSAGES, None).score == 0.5
    path = tmp_path / "two.py"
    path.write_text("def f(messages, truth): return 0.5\n")
    error = sandbox.evaluate(str(path), MESSAGES, None).error
    assert error is not None
    assert error.kind == "import"


def test_what_is_named_in_read_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "list.txt").write_text("0.5")
    (tmp_path / "r.py").write_text("def f(messages, truth): return float(open(truth).read())")
    with Sandbox(timeout_s=2.0, read=[tmp_path / "words"]) as sandbox:
        assert sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, str(tmp_path / "words" / "list.txt")).score == 0.5


def test_a_subprocess_is_a_permission_and_ends_with_its_worker(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import subprocess\n"
        "def f(messages, truth): return float(subprocess.run(['/bin/echo', '0.5'], capture_output=True).stdout)\n"
        "def g(messages, truth): return float(subprocess.Popen(['/bin/sleep', '77'], start_new_session=True).pid)\n"
    )
    with Sandbox(timeout_s=3.0, permissions=["subprocess"], require=True) as sandbox:
        assert sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None).score == 0.5
        pid = sandbox.evaluate(f"{tmp_path / 'r.py'}:g", MESSAGES, None).score
        assert pid is not None
    assert not Path(f"/proc/{int(pid)}/environ").exists() or not Path(f"/proc/{int(pid)}/cmdline").read_bytes()


def test_programs_may_be_started_as_make_starts_them(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import os\n"
        "def f(messages, truth):\n"
        "    pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 7'], {}, resetids=True)\n"
        "    return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    with Sandbox(timeout_s=3.0, permissions=["subprocess"]) as sandbox:
        assert sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None).score == 7.0


def test_with_a_subprocess_the_trainer_still_gets_no_signal(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import os, subprocess\n"
        "def f(messages, truth):\n"
        "    return float(subprocess.run(['/bin/sh', '-c', f'kill -URG {os.getppid()}']).returncode == 0)\n"
    )
    with Sandbox(timeout_s=3.0, permissions=["subprocess"]) as sandbox:
        assert sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, None).score == 0.0


def test_the_network_is_a_permission(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import socket\ndef f(messages, truth): socket.create_connection(('127.0.0.1', truth)).close(); return 1.0"
    )
    with socket.create_server(("127.0.0.1", 0)) as server, Sandbox(timeout_s=2.0, permissions=["network"]) as sandbox:
        assert sandbox.evaluate(f"{tmp_path / 'r.py'}:f", MESSAGES, server.getsockname()[1]).score == 1.0


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tier": "strict"}, "strict"),
        ({"permissions": ["everything"]}, "everything"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ToolwiseError, match=word):
        Sandbox(**settings)  # type: ignore[arg-type]


def test_off_runs_in_process_and_warns(rewards: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    with Sandbox("off") as sandbox:
        assert sandbox.evaluate(rewards("as_told"), MESSAGES, "pid").score == os.getpid()
        assert sandbox.evaluate_batch(rewards("all_of_them"), [MESSAGES] * 2, [4, 5])[0].score == 1.0
        error = sandbox.evaluate(rewards("as_told"), MESSAGES, "raise").error
        assert error is not None
        assert error.kind == "exception"
        assert "off" in sandbox.describe()
    assert "off" in caplog.text


async def _both(sandbox: Sandbox, reference: str) -> list[float | None]:
    one = sandbox.run_in_thread(lambda: sandbox.evaluate(reference, MESSAGES, "sleep"))
    many = [
        sandbox.run_in_thread(lambda: sandbox.evaluate_batch(reference, [MESSAGES] * 3, [""] * 3)) for _ in range(8)
    ]
    results = await asyncio.gather(one, *many)
    return [results[0].score, *(r.score for batch in results[1:] for r in batch)]  # type: ignore[union-attr]


def test_awaited_calls_run_beside_each_other(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    assert asyncio.run(_both(sandbox, rewards("as_told"))) == [1.0] * 25


def test_many_threads_share_a_sandbox(sandbox: Sandbox, rewards: Callable[[str], str]) -> None:
    scores: list[float | None] = []
    threads = [
        threading.Thread(
            target=lambda: scores.extend(sandbox.evaluate(rewards("right"), MESSAGES, 4).score for _ in range(20))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 120


def test_a_worker_killed_during_a_call_is_a_died_fault(rewards: Callable[[str], str]) -> None:
    with Sandbox(timeout_s=5.0, workers=1) as sandbox:
        sandbox.evaluate(rewards("as_told"), MESSAGES, "")
        [pid] = [worker.process.pid for idle in sandbox._pool._idle.values() for worker in idle]
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        error = sandbox.evaluate(rewards("as_told"), MESSAGES, "loop").error
        assert error is not None
        assert error.kind == "died"
        assert "SIGKILL" in error.message
        assert sandbox.evaluate(rewards("as_told"), MESSAGES, "").score == 1.0


def test_closing_ends_a_call_under_way_and_leaves_nothing(rewards: Callable[[str], str]) -> None:
    sandbox = Sandbox(timeout_s=30.0)
    threading.Timer(0.7, sandbox.close).start()
    began = time.monotonic()
    error = sandbox.evaluate(rewards("as_told"), MESSAGES, "loop").error
    assert error is not None
    assert error.kind == "died"
    assert time.monotonic() - began < 10
    root = sandbox._pool.scratch_root.path
    time.sleep(0.3)
    assert sandbox.pids() == []
    assert root is not None
    assert not root.exists()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.evaluate(rewards("as_told"), MESSAGES, "")


def _program(body: str, *arguments: str) -> subprocess.Popen[str]:
    source = (
        "from toolwise.sandbox import Sandbox\nimport os, sys, time, threading\nM = [{'role': 'user', 'content': ''}]\n"
    )
    command = [sys.executable, "-c", source + textwrap.dedent(body), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _gone(pids: list[int], within_s: float = 3.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("order", ["loop", "close_the_pipe_and_loop"])
def test_no_orphan_is_left_when_the_trainer_is_killed(tmp_path: Path, order: str) -> None:
    (tmp_path / "r.py").write_text(
        "import os\n"
        "def f(messages, truth):\n"
        "    for fd in range(3, 64) if truth != 'loop' else ():\n"
        "        try:\n"
        "            if os.fstat(fd).st_mode & 0o170000 == 0o010000: os.close(fd)  # the pipe that tells of the end\n"
        "        except OSError: pass\n"
        "    while True: pass\n"
    )
    program = _program(
        """
        sandbox = Sandbox(timeout_s=60)
        threading.Thread(target=sandbox.evaluate, args=(sys.argv[1], M, sys.argv[2]), daemon=True).start()
        while len(sandbox.pids()) < 2: time.sleep(0.02)
        time.sleep(1.0)
        print(*sandbox.pids(), flush=True)
        time.sleep(60)
        """,
        f"{tmp_path / 'r.py'}:f",
        order,
    )
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    program.kill()
    program.wait()
    assert _gone(pids)


def test_a_program_that_forgets_to_close_ends_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(messages, truth): return 1.0\n")
    program = _program(
        """
        sandbox = Sandbox(timeout_s=5)
        assert sandbox.evaluate(sys.argv[1], M, None).score == 1.0
        print(sandbox._pool.scratch_root.path, *sandbox.pids(), flush=True)
        """,
        f"{tmp_path / 'r.py'}:f",
    )
    out, _ = program.communicate(timeout=60)
    root, *pids = out.split()
    assert program.returncode == 0
    assert _gone([int(pid) for pid in pids])
    assert not Path(root).exists()


def test_a_forked_child_has_workers_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import os\ndef f(messages, truth): return float(os.getpid())\n")
    program = _program(
        """
        sandbox = Sandbox(timeout_s=5)
        mine = sandbox.evaluate(sys.argv[1], M, None).score
        child = os.fork()
        if child == 0:
            ok = sandbox.evaluate(sys.argv[1], M, None).score not in (None, mine)
            sandbox.close()
            os._exit(0 if ok else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, sandbox.evaluate(sys.argv[1], M, None).score == mine)
        sandbox.close()
        """,
        f"{tmp_path / 'r.py'}:f",
    )
    out, _ = program.communicate(timeout=60)
    assert out.split() == ["0", "True"]


def test_the_kinds_are_these() -> None:
    assert len(KINDS) == 11
