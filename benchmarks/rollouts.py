"""Benchmark rollouts: how well they overlap, the overhead per turn, and the memory per rollout.

    python benchmarks/rollouts.py            all parts, about three minutes
    python benchmarks/rollouts.py overlap    one 0.1 s tool call in each of N rollouts, against bare asyncio
    python benchmarks/rollouts.py faults     the same with 1 % of the tools hanging and 1 % raising
    python benchmarks/rollouts.py turns      the time of one turn without model and tool, against bare asyncio
    python benchmarks/rollouts.py memory     4,096 rollouts of 10 turns
    python benchmarks/rollouts.py trl        the overlap of TRL's GRPOTrainer (rollouts_trl.py; `make bench-env` first)

Each part runs in a separate process, TRL's also in a separate environment.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolwise.messages import Message, Prefix, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema
from toolwise.types import Rollout, RouteDecision, StopReason, Task

CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
TOOL_S = 0.1
REPEATS = 3
TURNS, CHARACTERS, TOKENS = 10, 200, 60
BENCH_ENV = Path(__file__).parents[1] / ".venv-bench"


class WaitTool(BaseTool):
    """Waits; the first instances hang, the next ones raise."""

    def __init__(self, seconds: float, *, hanging: int = 0, raising: int = 0, says: str = "done") -> None:
        super().__init__({}, OpenAIFunctionToolSchema(function=FunctionSchema(name="wait", description="Waits.")))
        self.seconds, self.hanging, self.raising, self.says = seconds, hanging, raising, says
        self._made = 0

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self._made += 1
        return str(self._made)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        number = int(instance_id)
        if number <= self.hanging:
            await asyncio.sleep(1e9)
        if number <= self.hanging + self.raising:
            raise RuntimeError("broken")
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return self.says, None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


def decisions(count: int) -> list[RouteDecision]:
    prompt = [Message(role="user", content="?")]
    return [RouteDecision(Task(task_id=str(i), prompt=prompt), f"g{i}", 1, i, prompt) for i in range(count)]


async def rolled_out(
    count: int, tool: BaseTool, policy: Any, *, clock: Callable[[], float] = time.perf_counter, **more: Any
) -> tuple[float, list[Rollout]]:
    settings = {"max_concurrent": count, "deadline_s": 60.0, "tool_timeout_s": 60.0, **more}
    scheduler = RolloutScheduler(policy, {tool.name: tool}, **settings)
    wanted = decisions(count)
    began = clock()
    rollouts = await scheduler.roll_out(wanted)
    return clock() - began, rollouts


async def bare(count: int) -> float:
    async def one() -> None:
        await asyncio.sleep(TOOL_S)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - began


def overlap(count: int) -> dict[str, Any]:
    """The best of a few runs: other load only adds time."""
    policy = ScriptedPolicy([CALL, "done"])
    ours, theirs = [], []
    for _ in range(REPEATS):
        theirs.append(asyncio.run(bare(count)))
        seconds, rollouts = asyncio.run(rolled_out(count, WaitTool(TOOL_S), policy))
        assert all(r.stop_reason is StopReason.ANSWERED for r in rollouts)
        ours.append(seconds)
    return {"n": count, "seconds": min(ours), "times_perfect": min(ours) / TOOL_S, "bare": min(theirs) / TOOL_S}


def faults(count: int) -> dict[str, Any]:
    hanging = raising = count // 100
    deadline_s = 5.0
    tool = WaitTool(TOOL_S, hanging=hanging, raising=raising)
    finished: list[tuple[float, StopReason]] = []
    scheduler = RolloutScheduler(
        ScriptedPolicy([CALL, "done"]), {tool.name: tool}, max_concurrent=count, deadline_s=deadline_s
    )
    began = time.perf_counter()

    def note(rollout: Rollout) -> None:
        finished.append((time.perf_counter() - began, rollout.stop_reason))

    rollouts = asyncio.run(scheduler.roll_out(decisions(count), on_done=note))
    total = time.perf_counter() - began
    late = [seconds for seconds, reason in finished if reason is StopReason.DEADLINE]
    assert len(rollouts) == count
    assert len(late) == hanging
    others = [seconds for seconds, reason in finished if reason is StopReason.ANSWERED]
    assert len(others) == count - hanging
    return {"n": count, "others_last": max(others), "total": total, "deadline_s": deadline_s}


class TurnPolicy:
    """Calls a tool that answers at once in every turn but the last, with tokens like a model's."""

    def __init__(self, turns: int, *, tokens: int = 0) -> None:
        self.turns, self.tokens = turns, tokens
        self.call = ToolCall(id="call_0", name="wait", arguments={})

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> TurnSession:
        return TurnSession(self)

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        raise NotImplementedError


class TurnSession:
    def __init__(self, policy: TurnPolicy) -> None:
        self.policy, self.turn, self.buffer = policy, 0, array("i")

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        self.turn += 1
        logprobs, text = None, "x"
        if self.policy.tokens:  # as a model would: new text and tokens in each turn
            text = f"{self.turn:x>{CHARACTERS}}"
            ids = array("i", range(self.policy.tokens))
            logprobs = {
                "token_ids": ids,
                "logprobs": array("f", [-0.5] * self.policy.tokens),
                "prompt_ids": Prefix(self.buffer),
                "finish_reason": "stop",
                "policy_version": 0,
            }
            self.buffer.extend(ids)
        if self.turn == self.policy.turns:
            return {"type": "text", "content": "done"}, "done", logprobs, None
        call = self.policy.call.model_copy() if self.policy.tokens else self.policy.call
        return {"type": "tool_call", "content": text, "tool_calls": [call]}, text, logprobs, None


async def bare_turns(count: int, turns: int) -> float:
    """The same awaits with nothing around them: a policy, a tool, a message list."""

    async def policy(messages: list[dict[str, str]]) -> dict[str, str]:
        return {"role": "assistant", "content": "x"}

    async def tool(arguments: dict[str, str]) -> dict[str, str]:
        return {"role": "tool", "content": "done"}

    async def episode() -> None:
        messages: list[dict[str, str]] = []
        for _ in range(turns):
            messages.append(await policy(messages))
            messages.append(await asyncio.wait_for(asyncio.create_task(tool({})), 60))

    began = time.process_time()
    await asyncio.gather(*(episode() for _ in range(count)))
    return time.process_time() - began


async def limited_turns(count: int, turns: int) -> float:
    """The same guarantees written by hand: limits on the model and the tool, concurrent calls within a turn, a deadline
    for each call and for the episode."""
    model, tools = asyncio.Semaphore(count), asyncio.Semaphore(count)

    async def policy(messages: list[dict[str, Any]]) -> dict[str, Any]:
        async with model:
            return {"role": "assistant", "content": "x", "calls": [{}]}

    async def tool(arguments: dict[str, str]) -> dict[str, str]:
        return {"role": "tool", "content": "done"}

    async def call(arguments: dict[str, str]) -> dict[str, str]:
        async with tools:
            return await asyncio.wait_for(tool(arguments), 60)

    async def episode() -> None:
        messages: list[dict[str, Any]] = []
        async with asyncio.timeout(600):
            for _ in range(turns):
                reply = await policy(messages)
                messages += [reply, *await asyncio.gather(*(call(arguments) for arguments in reply["calls"]))]

    began = time.process_time()
    await asyncio.gather(*(episode() for _ in range(count)))
    return time.process_time() - began


def turns(count: int) -> dict[str, Any]:
    """CPU time of this process: nothing waits here, and other load does not count."""
    rounds = range(max(3, 4096 // count))
    framework = {"max_episode_steps": 99, "clock": time.process_time}
    ours = [asyncio.run(rolled_out(count, WaitTool(0.0), TurnPolicy(TURNS), **framework))[0] for _ in rounds]
    theirs = [asyncio.run(bare_turns(count, TURNS)) for _ in rounds]
    by_hand = [asyncio.run(limited_turns(count, TURNS)) for _ in rounds]
    per_turn = 1e6 / (count * TURNS)
    return {
        "n": count,
        "us_per_turn": min(ours) * per_turn,
        "bare_us": min(theirs) * per_turn,
        "bare_with_limits_us": min(by_hand) * per_turn,
        "times_bare": min(ours) / min(theirs),
    }


def memory(count: int) -> dict[str, Any]:
    tool, policy = WaitTool(0.0, says="y" * CHARACTERS), TurnPolicy(TURNS, tokens=TOKENS)
    kept = asyncio.run(rolled_out(8, tool, policy, max_episode_steps=99))[1]
    gc.collect()
    before = rss_kb()
    kept += asyncio.run(rolled_out(count, tool, policy, max_episode_steps=99))[1]
    gc.collect()
    return {"n": count, "kb_each": (rss_kb() - before) / count, "held": len(kept)}


def rss_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def trl(count: int) -> dict[str, Any]:
    """The same measurement of TRL's tool loop; its other output goes to stderr."""
    script = Path(__file__).with_name("rollouts_trl.py")
    done = subprocess.run([BENCH_ENV / "bin" / "python", script, str(count)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


PARTS: dict[str, tuple[Any, Sequence[int]]] = {
    "overlap": (overlap, (32, 512, 4096)),
    "faults": (faults, (512, 4096)),
    "turns": (turns, (64, 1024)),
    "memory": (memory, (4096,)),
    "trl": (trl, (32, 128)),
}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        part, count = sys.argv[1], int(sys.argv[2])
        print(json.dumps(PARTS[part][0](count)))
        return
    wanted = sys.argv[1:] or list(PARTS)
    for part in wanted:
        if part == "trl" and not (BENCH_ENV / ".ready").exists():
            print("trl       not measured: make bench-env first", flush=True)
            continue
        for count in PARTS[part][1]:
            load = os.getloadavg()[0]
            done = subprocess.run([sys.executable, __file__, part, str(count)], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            figures = json.loads(done.stdout)
            told = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
            print(f"{part:8}  {told}  (load {load:.1f})", flush=True)


if __name__ == "__main__":
    main()
