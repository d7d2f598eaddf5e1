"""`check_env` passes good environments and finds one planted bug of each kind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from toolwise.checks.contract import CheckReport
from toolwise.checks.env import check as env_check
from toolwise.checks.env.check import check_env
from toolwise.envs.base import BaseEnv
from toolwise.envs.gsm8k import Gsm8kEnv
from toolwise.envs.gymnasium import GymnasiumEnv
from toolwise.envs.interactions import InteractiveEnv, ScriptedInteraction
from toolwise.envs.methods_env import MethodsEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.tools import Gsm8kTool, build_tools
from toolwise.types import Task

TASK = Task(task_id="t", prompt=[])
GONE = {"left": -1, "right": 1}


class Corridor(BaseEnv):
    """Five cells, a start that the seed draws, and a door at the right end."""

    length = 5

    def __init__(self) -> None:
        self.random = random.Random()
        self.cell = 0
        self.over = False

    def set_seed(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def reset(self) -> str:
        self.cell = self.random.randrange(self.length - 1)
        return f"You are in cell {self.cell}."

    async def step(self, action: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        if self.over:
            raise RuntimeError("the episode is over")
        if action not in GONE:
            return "Write left or right.", None, False, {"is_action_valid": False}
        self.cell = max(0, self.cell + GONE[action])
        self.over = self.cell == self.length - 1
        return f"You are in cell {self.cell}.", float(self.over), self.over, {}

    @property
    def state_key(self) -> str | None:
        return str(self.cell)

    def gold_actions(self) -> Sequence[str]:
        return ["right"] * (self.length - 1 - self.cell)

    def example_actions(self) -> Sequence[str]:
        return ["left", "right"]


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        """Adds."""
        self.n += k
        return self.n


def verdict(check: CheckReport, name: str) -> tuple[str, str]:
    return next((finding.verdict, finding.says) for finding in check.findings if finding.name == name)


@pytest.mark.parametrize(
    "make",
    [
        Corridor,
        lambda: GymnasiumEnv("FrozenLake-v1"),
        lambda: ToolEnv(TASK, build_tools(["calculator"])),
        lambda: MethodsEnv(Counter),
        lambda: Gsm8kEnv(Gsm8kTool(), {"question": "?", "answer": "8"}, oracle=True),
        lambda: InteractiveEnv(ToolEnv(TASK, build_tools(["calculator"])), ScriptedInteraction(["and?"]), TASK),
    ],
    ids=["corridor", "frozen lake", "tools", "methods", "gsm8k", "interactive"],
)
def test_good_worlds_pass(make: Any) -> None:
    check = check_env(make)
    assert check.ok, check.findings
    assert [f for f in check.findings if f.verdict == "warning" and f.name not in ("state key", "event loop")] == []
    assert len({finding.name for finding in check.findings}) == len(check.findings) == 12
    assert check.to_json()["ok"] is True


def test_what_a_good_world_is_told() -> None:
    check = check_env(Corridor)
    assert verdict(check, "gold actions")[0] == "ok"
    assert verdict(check, "after the end") == (
        "ok",
        "a step after the end is refused (step 2 raised RuntimeError: the episode is over)",
    )
    assert "another seed gives another episode" in verdict(check, "determinism")[1]
    assert verdict(check, "done and truncated")[1] == "episodes tried: ended, did not end"


class BreaksAtReset(Corridor):
    async def reset(self) -> str:
        raise OSError("no world")


class BreaksInAStep(Corridor):
    async def step(self, action: str) -> Any:
        raise KeyError(action)


class BreaksWhenClosed(Corridor):
    async def close(self) -> None:
        raise OSError("stuck")


class FiveValues(Corridor):
    async def step(self, action: str) -> Any:
        observation, reward, done, info = await super().step(action)
        return observation, reward, done, False, info


class BadReward(Corridor):
    async def step(self, action: str) -> Any:
        observation, _, done, info = await super().step(action)
        return observation, float("nan"), done, info


class TruncatedAndGoingOn(Corridor):
    length = 50

    async def step(self, action: str) -> Any:
        observation, reward, done, info = await super().step(action)
        return observation, reward, done, {**info, "truncated": True}


class BadSpecs(Corridor):
    def tool_specs(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "go", "parameters": {"type": "strnig"}}}]


class TwinSpecs(Corridor):
    def tool_specs(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "go", "description": "Goes."}}] * 2


class SilentSpecs(Corridor):
    def tool_specs(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "go"}}]


class IgnoresTheSeed(Corridor):
    length = 500

    def set_seed(self, seed: int) -> None:
        return


class RandomSteps(Corridor):
    async def step(self, action: str) -> Any:
        observation, reward, done, info = await super().step(action)
        return f"{observation} {random.random()}", reward, done, info


class RandomStates(Corridor):
    @property
    def state_key(self) -> str:
        return str(random.random())


class ConstantStates(Corridor):
    length = 50

    @property
    def state_key(self) -> str:
        return "somewhere"


class UniqueStates(Corridor):
    length = 50

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    async def step(self, action: str) -> Any:
        self.said.append(action)
        return await super().step(action)

    @property
    def state_key(self) -> str:
        return "/".join(self.said)


class SharedState(Corridor):
    length = 50
    cells: list[int] = [0]  # noqa: RUF012 (the planted bug)

    async def reset(self) -> str:
        self.cells[0] = 10
        return "in"

    async def step(self, action: str) -> Any:
        self.cells[0] += GONE.get(action, 0)
        return f"cell {self.cells[0]}", 0.0, False, {"is_action_valid": action in GONE}

    def gold_actions(self) -> Any:
        return None


class CrashesOnNonsense(Corridor):
    async def step(self, action: str) -> Any:
        return await super().step({"left": "left", "right": "right"}[action])


class TakesNonsense(Corridor):
    async def step(self, action: str) -> Any:
        observation, reward, done, _ = await super().step(action)
        return observation, reward, done, {}


class GoesOnAfterTheEnd(Corridor):
    async def step(self, action: str) -> Any:
        if self.over:
            return "still here", 0.0, False, {}
        return await super().step(action)


class ClosesOnce(Corridor):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise OSError("closed already")
        self.closed = True


class ClosesOnlyAfterReset(Corridor):
    handle: Any = None

    async def reset(self) -> str:
        self.handle = open  # stands for a resource
        return await super().reset()

    async def close(self) -> None:
        if self.handle is None:
            raise AttributeError("no handle")


class WrongGold(Corridor):
    def gold_actions(self) -> Sequence[str]:
        return ["left"]


class LongGold(Corridor):
    def gold_actions(self) -> Sequence[str]:
        return ["right"] * 10


class UnrewardedGold(Corridor):
    async def step(self, action: str) -> Any:
        observation, _, done, info = await super().step(action)
        return observation, -1.0, done, info


class FailedGold(Corridor):
    async def step(self, action: str) -> Any:
        observation, reward, done, info = await super().step(action)
        return observation, reward, done, {**info, "success": False} if done else info


class Hangs(Corridor):
    async def step(self, action: str) -> Any:
        await asyncio.sleep(60)


class SynchronousReset(Corridor):
    def reset(self) -> Any:
        return "here"


@pytest.mark.parametrize(
    ("kind", "finding", "expected", "said"),
    [
        (BreaksAtReset, "life cycle", "wrong", "reset raised OSError: no world"),
        (BreaksInAStep, "life cycle", "wrong", "step 1 raised KeyError"),
        (BreaksWhenClosed, "life cycle", "wrong", "close raised OSError: stuck"),
        (FiveValues, "life cycle", "wrong", "step 1 returned 5 values"),
        (SynchronousReset, "life cycle", "wrong", "reset is not a coroutine"),
        (Hangs, "life cycle", "wrong", "step 1 took longer than 0.5 s"),
        (BadReward, "types", "wrong", "the reward is nan"),
        (TruncatedAndGoingOn, "done and truncated", "wrong", 'info["truncated"] is True but done is not'),
        (BadSpecs, "tool specs", "wrong", "its parameters are not a valid JSON schema"),
        (TwinSpecs, "tool specs", "wrong", "two tools are named 'go'"),
        (SilentSpecs, "tool specs", "warning", "no description"),
        (IgnoresTheSeed, "determinism", "wrong", "at reset: observation"),
        (RandomSteps, "determinism", "wrong", "at step 1: observation"),
        (RandomStates, "determinism", "wrong", "at reset: state_key"),
        (ConstantStates, "state key", "warning", "constant over"),
        (UniqueStates, "state key", "warning", "occurred only once"),
        (SharedState, "independence", "wrong", "keep state in the object"),
        (CrashesOnNonsense, "invalid actions", "wrong", "step 1 raised KeyError"),
        (TakesNonsense, "invalid actions", "warning", "was not marked"),
        (GoesOnAfterTheEnd, "after the end", "wrong", "continues the episode"),
        (ClosesOnce, "close", "wrong", "second call: close raised OSError: closed already"),
        (ClosesOnlyAfterReset, "close", "wrong", "without a reset: close raised AttributeError"),
        (WrongGold, "gold actions", "wrong", "1 gold actions, but the episode did not end"),
        (LongGold, "gold actions", "wrong", "of 10 gold actions"),
        (UnrewardedGold, "gold actions", "wrong", "without reaching the goal: they earn -"),
        (FailedGold, "gold actions", "wrong", 'info["success"] is False'),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_planted_bug_is_found(kind: type[BaseEnv], finding: str, expected: str, said: str) -> None:
    check = check_env(kind, step_timeout_s=0.5 if kind is Hangs else 10)
    found, says = verdict(check, finding)
    assert (found, said in says) == (expected, True), says
    assert check.ok is (expected == "warning")


def test_a_world_that_blocks_the_loop_for_ever_is_given_up_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_check, "MIN_BLOCK_S", 0.2)

    class Blocks(Corridor):
        async def step(self, action: str) -> Any:
            time.sleep(5)  # noqa: ASYNC251
            return "", 0.0, True, {}

    began = time.monotonic()
    check = check_env(Blocks, step_timeout_s=0.5)
    assert time.monotonic() - began < 4.5
    found, says = verdict(check, "event loop")
    assert found == "wrong"
    assert "test_conformance.py" in says
    assert "Blocks.step" in says
    assert verdict(check, "determinism") == ("skipped", "not tried")


def test_gold_may_be_given_and_may_earn_little() -> None:
    def lake() -> BaseEnv:
        return GymnasiumEnv("FrozenLake-v1", make_kwargs={"is_slippery": False})

    walk = list("112212")
    assert verdict(check_env(lake, gold=walk), "gold actions") == ("ok", "6 actions reach the goal, earning 1")
    assert verdict(check_env(lake, gold=list("12")), "gold actions")[0] == "wrong"

    def cliff() -> BaseEnv:
        return GymnasiumEnv("CliffWalking-v1")

    along = list("0" + "1" * 11 + "2")
    assert verdict(check_env(cliff, gold=along), "gold actions")[0] == "wrong"
    assert verdict(check_env(cliff, gold=along, gold_reward=-13), "gold actions")[0] == "ok"
    assert verdict(check_env(cliff, gold=along, gold_reward=-12), "gold actions")[0] == "wrong"


def test_calls_can_be_gold() -> None:
    class Goal(Counter):
        @property
        def done(self) -> bool:
            return self.n >= 3

        def reward(self) -> float:
            return float(self.n == 3)

    right = {"name": "add", "arguments": {"k": 3}}
    wrong = {"name": "add", "arguments": {"k": 9}}
    assert verdict(check_env(lambda: MethodsEnv(Goal), gold=[right]), "gold actions")[0] == "ok"
    assert verdict(check_env(lambda: MethodsEnv(Goal), gold=[wrong]), "gold actions")[0] == "ok"
    poor = check_env(lambda: MethodsEnv(Goal), gold=[wrong], gold_reward=1.0)
    assert verdict(poor, "gold actions")[0] == "wrong"
