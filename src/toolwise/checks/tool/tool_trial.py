"""The calls that `check_tool` makes: each method tries one promise of the life cycle and says what it saw."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from toolwise.checks.tool import sample_arguments
from toolwise.concurrency.deadlines import GRACE_S, run_with_deadline
from toolwise.tools.base import BaseTool
from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.schema import validate_arguments

T = TypeVar("T")
TrialOutcome = tuple[Literal["ok", "warning", "wrong"], str]

CONCURRENT_INSTANCES = 8
MAX_RESULT_CHARS = 4000
"""Characters that a model gets to read of a result, unless a run says otherwise."""
_NONDETERMINISTIC = "cannot be told: equal calls differ even from instances that are alone"
_HEARTBEAT_S = 0.02
_BLOCKED_S = 0.5


class ToolTrial:
    """One tool and the calls to try it with."""

    def __init__(
        self, tool: BaseTool, calls: list[dict[str, Any]], create_kwargs: dict[str, Any], timeout_s: float
    ) -> None:
        self.tool, self.calls, self.create_kwargs, self.timeout_s = tool, calls, create_kwargs, timeout_s
        self.slowest_s = 0.0
        self._longest_gap_s = 0.0
        self._solo_texts: list[str] = []
        """What the calls say one after the other to an instance that is alone."""
        self._deterministic = True

    async def life_cycle(self) -> TrialOutcome:
        first, second = await self._create(), await self._create()
        for instance in (first, second):
            if not isinstance(instance, str) or not instance:
                return "wrong", f"create gave {instance!r:.80}; give the instance's id, a string"
        if first == second:
            return "wrong", f"create gave the same id twice ({first!r:.80}); rollouts would share an instance"
        await self._execute(first, self.calls[0])
        reward = await self._with_timeout(self.tool.calc_reward(first))
        if not _is_reward(reward):
            return "wrong", f"calc_reward gave {reward!r:.80}; give a finite number or None"
        await self._with_timeout(self.tool.release(first))
        await self._execute(second, self.calls[0])  # one rollout's end is nothing to another
        await self._with_timeout(self.tool.release(second))
        try:
            await self._with_timeout(self.tool.release(second))
        except Exception as fault:
            return "wrong", f"release fails where there is nothing to release: {type(fault).__name__}: {fault}"
        named = await self._create("my-id")
        await self._with_timeout(self.tool.release(named))
        if named != "my-id":
            return "warning", f"create('my-id') gave {named!r:.80}; give back the id you were given"
        return "ok", f"create, execute, calc_reward ({reward}), release"

    async def results(self) -> TrialOutcome:
        longest = 0
        for result in await self._solo_results():
            problem = _result_problem(result)
            if problem:
                return "wrong", problem
            longest = max(longest, len(result[0]))
        if longest > MAX_RESULT_CHARS:
            return "warning", f"{longest} characters; of a result models read the first {MAX_RESULT_CHARS}: say less"
        return "ok", f"texts of up to {longest} characters"

    async def equal_calls(self) -> TrialOutcome:
        self._solo_texts = [result[0] for result in await self._solo_results()]
        if await self._is_deterministic():
            return "ok", "fresh instances say the same"
        return "warning", "fresh instances say different things: chance, the clock, or a state that they share"

    async def _is_deterministic(self) -> bool:
        """Asked again before anything is blamed on other instances: a clock says the same for a while, too."""
        if self._deterministic:
            self._deterministic = [result[0] for result in await self._solo_results()] == self._solo_texts
        return self._deterministic

    async def instances(self) -> TrialOutcome:
        """Two at a time, turn by turn: neither may notice the other."""
        if not self._deterministic:
            return "warning", _NONDETERMINISTIC
        pair = [await self._create(), await self._create()]
        texts: tuple[list[str], list[str]] = ([], [])
        for call in self.calls * 2:
            for instance, said in zip(pair, texts, strict=True):
                said.append((await self._execute(instance, call))[0])
        for instance in pair:
            await self._with_timeout(self.tool.release(instance))
        if texts[0] != texts[1] or texts[0][: len(self._solo_texts)] != self._solo_texts:
            if not await self._is_deterministic():
                return "warning", _NONDETERMINISTIC
            return "wrong", "two instances notice each other: keep what belongs to a rollout under its instance_id"
        return "ok", "two instances do not notice each other"

    async def concurrent_instances(self) -> TrialOutcome:
        runs = await asyncio.gather(*(self._solo_results() for _ in range(CONCURRENT_INSTANCES)))
        problems = [problem for run in runs for result in run if (problem := _result_problem(result))]
        if problems:
            return "wrong", problems[0]
        differ = self._deterministic and any([result[0] for result in run] != self._solo_texts for run in runs)
        if differ and await self._is_deterministic():
            return "wrong", f"{CONCURRENT_INSTANCES} instances at once say something else than one alone"
        return "ok", f"{CONCURRENT_INSTANCES} instances at once"

    async def odd_arguments(self) -> TrialOutcome:
        parameters = self.tool.tool_schema.function.parameters
        odd = sample_arguments.odd_arguments(parameters, self.calls[0])
        return await self._try_arguments([a for a in odd if not validate_arguments(self.tool.tool_schema, a)])

    async def bad_arguments(self) -> TrialOutcome:
        """A run's validation keeps most of these away from a tool; what it lets through the tool must bear."""
        parameters = self.tool.tool_schema.function.parameters
        bad = list(sample_arguments.bad_arguments(parameters, self.calls[0]))
        return await self._try_arguments([a for a in bad if not validate_arguments(self.tool.tool_schema, a)], len(bad))

    async def _try_arguments(self, arguments: list[dict[str, Any]], tried: int | None = None) -> TrialOutcome:
        """Messages are fine, exceptions are read by the model as they are, and anything else is wrong."""
        raised: list[str] = []
        instance = await self._create()
        for given in arguments:
            try:
                problem = _result_problem(await self._execute(instance, given))
            except ToolCallError as fault:
                if fault.infrastructure:
                    return "wrong", f"{_abbreviate(given)} brings down what stands behind the tool: {fault}"
                continue
            except TimeoutError as fault:
                return "wrong", f"{_abbreviate(given)}: {fault}"
            except Exception as fault:
                raised.append(f"{_abbreviate(given)} raises {type(fault).__name__}: {fault}")
                continue
            if problem:
                return "wrong", f"{_abbreviate(given)}: {problem}"
        await self._with_timeout(self.tool.release(instance))
        if raised:
            return "warning", f"{len(raised)} of {len(arguments)}: {raised[0]}; say it in words that help a model"
        seen = len(arguments) if tried is None else tried
        return "ok", f"{seen} tried, {len(arguments)} reached the tool, all were answered"

    async def cancellation(self) -> TrialOutcome:
        """A call is begun and called off, at once or a little later: it must end, and the tool must go on."""
        ended = 0
        for after_s in (0.0, 0.05):
            instance = await self._create()
            call = asyncio.ensure_future(self.tool.execute(instance, self.calls[0]))
            await asyncio.sleep(after_s)
            call.cancel()
            await asyncio.wait({call}, timeout=GRACE_S)
            if not call.done():
                return "wrong", f"a cancelled call is still at work {GRACE_S:g} s later: let CancelledError through"
            ended += call.cancelled() or call.exception() is not None
            await self._with_timeout(self.tool.release(instance))
        again = await self._create()
        await self._execute(again, self.calls[0])
        await self._with_timeout(self.tool.release(again))
        if not ended:
            return "ok", "it was done before it could be cancelled"
        return "ok", "a cancelled call ends, and the next one works"

    @asynccontextmanager
    async def monitor_event_loop(self) -> AsyncIterator[None]:
        """Notes the longest time that nothing else could run."""

        async def beat() -> None:
            while True:
                began = time.monotonic()
                await asyncio.sleep(_HEARTBEAT_S)
                self._longest_gap_s = max(self._longest_gap_s, time.monotonic() - began - _HEARTBEAT_S)

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            await asyncio.sleep(_HEARTBEAT_S * 2)
            beating.cancel()

    def loop_verdict(self) -> TrialOutcome:
        if self._longest_gap_s > _BLOCKED_S:
            says = f"it kept all other rollouts waiting for {self._longest_gap_s:.1f} s: await, or work in a thread"
            return "wrong", says
        return "ok", f"others waited {self._longest_gap_s:.3f} s at most"

    async def _solo_results(self) -> list[Any]:
        instance = await self._create()
        try:
            return [await self._execute(instance, call) for call in self.calls]
        finally:
            await self._with_timeout(self.tool.release(instance))

    async def _create(self, instance_id: str | None = None) -> str:
        return await self._with_timeout(self.tool.create(instance_id, **self.create_kwargs))

    async def _execute(self, instance: str, call: dict[str, Any]) -> Any:
        began = time.monotonic()
        try:
            return await self._with_timeout(self.tool.execute(instance, json.loads(json.dumps(call))))
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    async def _with_timeout(self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        return await run_with_deadline(self.timeout_s, whole(), TimeoutError(f"took longer than {self.timeout_s:g} s"))


def _result_problem(result: Any) -> str | None:
    if not isinstance(result, tuple) or len(result) != 3:
        return f"execute gave {result!r:.80}; give (text, reward or None, info)"
    text, reward, info = result
    if not isinstance(text, str):
        return f"execute gave the text {text!r:.80}; give a string"
    if not _is_reward(reward):
        return f"execute gave the reward {reward!r:.80}; give a finite number or None"
    if not isinstance(info, dict):
        return f"execute gave the info {info!r:.80}; give a dictionary"
    try:
        json.dumps(info)
    except (TypeError, ValueError) as fault:
        return f"execute gave an info that cannot be written as JSON: {fault}"
    return None


def _is_reward(value: Any) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))
    )


def _abbreviate(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments)
    return text if len(text) <= 80 else f"{text[:80]}…"
