"""A plain class as an environment: only its public methods, one object per episode, whatever a method does."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from toolwise.envs.methods_env import MethodsEnv, method_tools
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.types import StopReason, Task


class Order(Enum):
    NAME = "name"
    SIZE = "size"


class Base:
    def pwd(self) -> str:
        """Where we are."""
        return self.here  # type: ignore[attr-defined,no-any-return]

    def hidden_by_an_attribute(self) -> str:
        return "reachable"


class FileSystem(Base):
    """A folder with files."""

    hidden_by_an_attribute = None  # type: ignore[assignment]

    class Nested:
        pass

    def __init__(self, files: dict[str, str] | None = None, goal: str = "done.txt") -> None:
        self.files = dict(files or {})
        self.here = "/"
        self.goal = goal
        self.closed = 0
        self._secret = "42"
        self.callback = lambda: "never"

    def write(self, name: str, text: str = "") -> None:
        """Write a file.

        Args:
            name: what it is called
            text: what it says
        """
        self.files[name] = text

    async def read(self, name: str) -> str:
        """Read a file."""
        await asyncio.sleep(0)
        return self.files[name]

    def ls(self, order: Order = Order.NAME) -> list[str]:
        """List files."""
        return sorted(self.files, key=None if order is Order.NAME else lambda name: len(self.files[name]))

    @staticmethod
    def version() -> str:
        """The version."""
        return "1.0"

    @classmethod
    def make(cls) -> FileSystem:
        return cls()

    @property
    def secret(self) -> str:
        raise AssertionError("a property was run")

    def _rm(self, name: str) -> None:
        del self.files[name]

    def reset(self, seed: int | None = None) -> str:
        self.files["seed"] = str(seed)
        return f"{len(self.files)} files"

    @property
    def done(self) -> bool:
        return self.goal in self.files

    def reward(self) -> float:
        return float(self.done)

    def close(self) -> None:
        self.closed += 1


class Trouble:
    """Methods that misbehave."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.count = 0

    def hang(self) -> str:
        """Hangs."""
        self.free.wait(10)
        return "back"

    async def hang_async(self) -> str:
        """Hangs."""
        await asyncio.sleep(60)
        return "never"

    def fail(self) -> str:
        """Fails."""
        raise KeyError("no such\nthing")

    def leave(self) -> str:
        """Leaves."""
        sys.exit(1)

    async def leave_async(self) -> str:
        """Leaves."""
        sys.exit(1)

    def for_ever(self) -> Iterator[int]:
        """Never ends."""
        while True:
            yield 1

    def odd(self, what: str) -> Any:
        """Odd objects."""
        loop: list[Any] = []
        loop.append(loop)
        things = {"object": object(), "loop": loop, "none": None, "set": {1}, "nan": float("nan"), "half": "\ud800"}
        return things[what]

    def rewarded(self) -> tuple[str, float]:
        """Gives a reward."""
        self.count += 1
        return "well done", 0.25

    def large(self) -> str:
        """Large."""
        return "x" * 100_000


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def call(tool: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"id-{tool}", name=tool, arguments=arguments)


async def turn(env: MethodsEnv, *calls: ToolCall) -> tuple[list[str], float | None, bool, dict[str, Any]]:
    messages, reward, done, info = await env.step({"type": "tool_call", "tool_calls": list(calls)})
    return [m.content or "" for m in messages], reward, done, info


def live(env: MethodsEnv, *calls: ToolCall) -> tuple[list[str], float | None, bool, dict[str, Any]]:
    async def episode() -> Any:
        await env.reset()
        try:
            return await turn(env, *calls)
        finally:
            await env.close()

    return run(episode())  # type: ignore[no-any-return]


def test_tools_are_the_public_methods_and_nothing_else() -> None:
    assert set(method_tools(FileSystem)) == {"pwd", "write", "read", "ls", "version"}


def test_schemas_come_from_signatures_and_docstrings() -> None:
    spec = next(s for s in MethodsEnv(FileSystem).tool_specs() if s["function"]["name"] == "write")
    assert spec["function"] == {
        "name": "write",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "what it is called"},
                "text": {"type": "string", "description": "what it says", "default": ""},
            },
            "required": ["name"],
        },
    }


@pytest.mark.parametrize(
    "name",
    [
        *("_rm", "__init__", "__class__", "__reduce__", "__getattribute__", "secret", "callback", "Nested", "make"),
        *("reset", "reward", "done", "close", "hidden_by_an_attribute", "files", "", "write.__func__"),
    ],
)
def test_what_is_not_a_public_method_cannot_be_reached(name: str) -> None:
    (text,), _, _, info = live(MethodsEnv(FileSystem), call(name))
    assert text.startswith("error: there is no tool")
    assert info["failed_calls"] == {"unknown_tool": 1}


def test_sync_async_and_static_methods_share_one_object() -> None:
    texts, _, done, info = live(
        MethodsEnv(FileSystem),
        *(call("write", name="b", text="hello"), call("write", name="a", text="longer words"), call("read", name="b")),
        *(call("ls"), call("ls", order="size"), call("version"), call("pwd")),
    )
    assert texts == ["null", "null", "hello", '["a", "b", "seed"]', '["seed", "b", "a"]', "1.0", "/"]
    assert not done
    assert info["is_action_valid"]


def test_calls_of_one_turn_run_in_their_order() -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[int] = []

        def add(self, n: int) -> list[int]:
            """Adds."""
            time.sleep(0.02 * (3 - n))
            self.lines.append(n)
            return list(self.lines)

    texts, *_ = live(MethodsEnv(Log), *(call("add", n=n) for n in range(3)))
    assert texts == ["[0]", "[0, 1]", "[0, 1, 2]"]


@pytest.mark.parametrize(
    ("bad", "failure"),
    [
        (call("write"), "bad_arguments"),
        (call("write", name=3), "bad_arguments"),
        (call("write", name="a", mode="w"), "bad_arguments"),
        (call("write", name="a", self="me"), "bad_arguments"),
        (call("ls", order="date"), "bad_arguments"),
        (ToolCall(name="ls", arguments="{"), "bad_json"),
    ],
)
def test_arguments_are_checked(bad: ToolCall, failure: str) -> None:
    (text,), _, _, info = live(MethodsEnv(FileSystem), bad)
    assert text.startswith("error: ")
    assert info["failed_calls"] == {failure: 1}


def test_each_episode_has_an_object_of_its_own() -> None:
    async def two() -> list[list[str]]:
        one, other = MethodsEnv(FileSystem), MethodsEnv(FileSystem)
        await one.reset()
        await other.reset()
        await turn(one, call("write", name="mine"))
        seen = [(await turn(env, call("ls")))[0] for env in (one, other)]
        await one.close()
        await other.close()
        return seen

    assert run(two()) == [['["mine", "seed"]'], ['["seed"]']]


def test_reset_gets_the_seed_done_ends_reward_is_named_and_close_comes_once() -> None:
    made: list[FileSystem] = []

    def make(kind: type) -> object:
        made.append(kind(files={"readme": "hi"}))
        return made[-1]

    async def episode() -> None:
        env = MethodsEnv(FileSystem, make=make)
        env.set_seed(7)
        assert await env.reset() == "2 files"
        assert made[0].files["seed"] == "7"
        assert (await turn(env, call("write", name="other")))[2] is False
        assert (await turn(env, call("write", name="done.txt")))[2] is True
        assert await env.final_rewards() == {"FileSystem": 1.0}
        await env.close()
        await env.close()

    run(episode())
    assert made[0].closed == 1


def test_states_are_named_by_what_is_public() -> None:
    async def keys() -> list[str | None]:
        env = MethodsEnv(FileSystem)
        found = [env.state_key]
        await env.reset()
        for calls in ([], [call("ls")], [call("write", name="x")], [call("write", name="x")]):
            if calls:
                await turn(env, *calls)
            found.append(env.state_key)
        await env.close()
        return found

    none, start, looked, wrote, again = run(keys())
    assert none is None
    assert start == looked != wrote == again


def test_a_class_may_name_its_states_itself() -> None:
    class Named:
        def go(self) -> str:
            """Goes."""
            return "gone"

        def state_key(self) -> str:
            return "here"

    class Dunder:
        def go(self) -> str:
            """Goes."""
            return "gone"

        def __state__(self) -> int:
            return 3

    async def key(env: MethodsEnv) -> str | None:
        await env.reset()
        return env.state_key

    assert run(key(MethodsEnv(Named))) == "here"
    assert run(key(MethodsEnv(Dunder))) == "3"
    assert run(key(MethodsEnv(Named, state_of=lambda objects: f"{len(objects)} objects"))) == "1 objects"


@pytest.mark.parametrize(
    ("name", "arguments", "said", "failure"),
    [
        ("fail", {}, "error: fail failed: KeyError: ", "exception"),
        ("leave", {}, "error: leave failed: RuntimeError: it called sys.exit(1)", "exception"),
        ("leave_async", {}, "error: leave_async failed: RuntimeError: it called sys.exit(1)", "exception"),
        ("for_ever", {}, "error: for_ever failed: TypeError: for_ever returned a generator", "exception"),
        (
            "odd",
            {"what": "object"},
            "error: odd failed: ToolwiseError: tool odd returned a value that is not JSON",
            "exception",
        ),
        ("odd", {"what": "loop"}, "error: odd failed: ", "exception"),
        ("odd", {"what": "none"}, "null", None),
        ("odd", {"what": "set"}, "[1]", None),
        ("odd", {"what": "half"}, "?", None),
        ("hang_async", {}, "error: hang_async took longer than 0.5 s", "timeout"),
    ],
)
def test_whatever_a_method_does_the_model_gets_an_answer(
    name: str, arguments: dict[str, Any], said: str, failure: str | None
) -> None:
    (text,), _, done, info = live(
        MethodsEnv(Trouble, tool_timeout_s=0.5 if failure == "timeout" else 10), call(name, **arguments)
    )
    assert text.startswith(said)
    assert not done
    assert info["failed_calls"] == ({failure: 1} if failure else {})


def test_a_method_that_hangs_is_left_behind_and_its_object_is_not_touched_again() -> None:
    made: list[Trouble] = []

    def make(kind: type) -> object:
        made.append(kind())
        return made[-1]

    async def episode() -> None:
        env = MethodsEnv(Trouble, make=make, tool_timeout_s=0.5)
        await env.reset()
        (text,), _, done, info = await turn(env, call("hang"))
        assert text == "error: hang took longer than 0.5 s"
        assert (done, info["failed_calls"]) == (False, {"timeout": 1})
        (text,), _, _, info = await turn(env, call("rewarded"))
        assert "an earlier call did not come back" in text
        assert info["failed_calls"] == {"exception": 1}
        assert env.state_key is None
        assert made[0].count == 0
        await env.close()
        made[0].free.set()

    run(episode())


def test_a_methods_reward_is_the_steps() -> None:
    texts, reward, _, _ = live(MethodsEnv(Trouble), call("rewarded"), call("rewarded"))
    assert (texts, reward) == (["well done"] * 2, 0.5)


def test_long_results_are_cut() -> None:
    (text,), *_ = live(MethodsEnv(Trouble, max_result_chars=50), call("large"))
    assert len(text) < 100


def test_several_classes_are_one_world() -> None:
    class Clock:
        def __init__(self) -> None:
            self.hour = 0

        def tick(self) -> int:
            """Ticks."""
            self.hour += 1
            return self.hour

        def reward(self) -> float:
            return 0.5

    async def episode() -> dict[str, float]:
        env = MethodsEnv([FileSystem, Clock])
        await env.reset()
        texts, *_ = await turn(env, call("tick"), call("tick"), call("pwd"))
        assert texts == ["1", "2", "/"]
        rewards = await env.final_rewards()
        await env.close()
        return rewards

    assert run(episode()) == {"FileSystem": 0.0, "Clock": 0.5}


def test_methods_can_be_chosen() -> None:
    def names(**options: Any) -> list[str]:
        return [spec["function"]["name"] for spec in MethodsEnv(FileSystem, **options).tool_specs()]

    assert names(methods=["ls", "read"]) == ["read", "ls"]
    assert "write" not in names(exclude=["write"])
    task = Task(task_id="t", prompt=[], tools=["pwd"])
    assert names(task=task) == ["pwd"]


class Bare:
    pass


class Unannotated:
    def go(self, where) -> str:  # type: ignore[no-untyped-def]
        return str(where)


@pytest.mark.parametrize(
    ("kinds", "options", "said"),
    [
        (Bare, {}, "Bare has no public methods to call"),
        (FileSystem, {"methods": ["_rm"]}, "FileSystem has no public method _rm; it has"),
        ([FileSystem, FileSystem], {}, "FileSystem and FileSystem both have pwd"),
        (Unannotated, {}, "parameter 'where' needs a type annotation"),
    ],
)
def test_classes_that_make_no_world_are_named(kinds: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ToolwiseError), match=said):
        MethodsEnv(kinds, **options)


def test_an_object_that_cannot_be_made_is_a_fault_and_the_others_are_closed() -> None:
    made = FileSystem()

    def make(kind: type) -> object:
        if kind is Trouble:
            raise OSError("no room")
        return made

    async def episode() -> None:
        env = MethodsEnv([FileSystem, Trouble], make=make)
        with pytest.raises(OSError, match="no room"):
            await env.reset()
        await env.close()

    run(episode())
    assert made.closed == 1


def test_an_async_close_is_awaited_and_a_failing_one_hides_no_other() -> None:
    log: list[str] = []

    class One:
        def go(self) -> None:
            """Goes."""

        async def close(self) -> None:
            await asyncio.sleep(0)
            log.append("one")

    class Two:
        def went(self) -> None:
            """Went."""

        def close(self) -> None:
            log.append("two")
            raise OSError("stuck")

    class Three:
        def gone(self) -> None:
            """Gone."""

        def close(self) -> None:
            log.append("three")

    async def episode() -> None:
        env = MethodsEnv([One, Two, Three])
        await env.reset()
        with pytest.raises(OSError, match="stuck"):
            await env.close()

    run(episode())
    assert sorted(log) == ["one", "three", "two"]


def test_an_episode_with_a_policy() -> None:
    task = Task(task_id="t", prompt=[Message(role="user", content="Write done.txt.")])
    line = '<tool_call>{"name": "write", "arguments": {"name": "done.txt"}}</tool_call>'
    worker = RLRolloutWorker(task, ScriptedPolicy([line]), env=MethodsEnv(FileSystem, task=task))
    steps, messages, _ = run(worker.run_episode())
    assert worker.stop_reason is StopReason.ENV_DONE
    assert worker.tool_rewards == {"FileSystem": 1.0}
    assert [m.role for m in messages] == ["user", "user", "assistant", "tool"]
    assert steps[0].step_info["state_key"]
