"""The calls that `check_tool` makes: each method tests one part of the tool contract and returns a verdict."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from toolwise.checks.contract import Outcome, is_finite_number, short_repr
from toolwise.checks.tool import sample_arguments
from toolwise.concurrency.deadlines import GRACE_S, run_with_deadline
from toolwise.tools.base import BaseTool
from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.schema import validate_arguments

T = TypeVar("T")

CONCURRENT_INSTANCES = 8
MAX_RESULT_CHARS = 4000
"""Default number of characters of a result that a model reads."""
_NONDETERMINISTIC = "cannot be tested: equal calls give different results even on a single instance"


class ToolTrial:
    """One tool and the calls to try it with."""

    def __init__(
        self, tool: BaseTool, calls: list[dict[str, Any]], create_kwargs: dict[str, Any], timeout_s: float
    ) -> None:
        self.tool, self.calls, self.create_kwargs, self.timeout_s = tool, calls, create_kwargs, timeout_s
        self.slowest_s = 0.0
        self._solo_texts: list[str] = []
        """Results of the calls in sequence on a single instance."""
        self._deterministic = True

    async def life_cycle(self) -> Outcome:
        first, second = await self._create(), await self._create()
        for instance in (first, second):
            if not isinstance(instance, str) or not instance:
                return "wrong", f"create returned {instance!r:.80}; return the instance id, a string"
        if first == second:
            return "wrong", f"create returned the same id twice ({first!r:.80}); rollouts would share an instance"
        await self._execute(first, self.calls[0])
        reward = await self._with_timeout(self.tool.calc_reward(first))
        if not (reward is None or is_finite_number(reward)):
            return "wrong", f"calc_reward returned {reward!r:.80}; return a finite number or None"
        await self._with_timeout(self.tool.release(first))
        await self._execute(second, self.calls[0])  # the end of one rollout must not affect another
        await self._with_timeout(self.tool.release(second))
        try:
            await self._with_timeout(self.tool.release(second))
        except Exception as fault:
            return "wrong", f"release fails if the instance is already released: {type(fault).__name__}: {fault}"
        named = await self._create("my-id")
        await self._with_timeout(self.tool.release(named))
        if named != "my-id":
            return "warning", f"create('my-id') returned {named!r:.80}; return the given id"
        return "ok", f"create, execute, calc_reward ({reward}), release"

    async def results(self) -> Outcome:
        longest = 0
        for result in await self._solo_results():
            problem = _result_problem(result)
            if problem:
                return "wrong", problem
            longest = max(longest, len(result[0]))
        if longest > MAX_RESULT_CHARS:
            return "warning", f"{longest} characters; models read only the first {MAX_RESULT_CHARS}: return less"
        return "ok", f"texts of up to {longest} characters"

    async def equal_calls(self) -> Outcome:
        self._solo_texts = [result[0] for result in await self._solo_results()]
        if await self._is_deterministic():
            return "ok", "new instances give the same results"
        return "warning", "new instances give different results: randomness, the clock, or shared state"

    async def _is_deterministic(self) -> bool:
        """Rerun before blaming other instances: a tool that reads the clock can repeat itself for a while."""
        if self._deterministic:
            self._deterministic = [result[0] for result in await self._solo_results()] == self._solo_texts
        return self._deterministic

    async def instances(self) -> Outcome:
        """Interleave calls on two instances: neither may affect the other."""
        if not self._deterministic:
            return "warning", _NONDETERMINISTIC
        pair = [await self._create(), await self._create()]
        texts: tuple[list[str], list[str]] = ([], [])
        for call in self.calls * 2:
            for instance, instance_texts in zip(pair, texts, strict=True):
                instance_texts.append((await self._execute(instance, call))[0])
        for instance in pair:
            await self._with_timeout(self.tool.release(instance))
        if texts[0] != texts[1] or texts[0][: len(self._solo_texts)] != self._solo_texts:
            if not await self._is_deterministic():
                return "warning", _NONDETERMINISTIC
            return "wrong", "two instances affect each other: keep state per instance_id"
        return "ok", "two instances do not affect each other"

    async def concurrent_instances(self) -> Outcome:
        runs = await asyncio.gather(*(self._solo_results() for _ in range(CONCURRENT_INSTANCES)))
        problems = [problem for run in runs for result in run if (problem := _result_problem(result))]
        if problems:
            return "wrong", problems[0]
        differ = self._deterministic and any([result[0] for result in run] != self._solo_texts for run in runs)
        if differ and await self._is_deterministic():
            return "wrong", f"{CONCURRENT_INSTANCES} concurrent instances give other results than a single one"
        return "ok", f"{CONCURRENT_INSTANCES} concurrent instances"

    async def odd_arguments(self) -> Outcome:
        return await self._try_arguments(sample_arguments.odd_arguments)

    async def bad_arguments(self) -> Outcome:
        return await self._try_arguments(sample_arguments.bad_arguments)

    async def _try_arguments(self, samples: Callable[..., Iterable[dict[str, Any]]]) -> Outcome:
        """An error message is fine; an exception is a warning (the model reads it as is); anything else is wrong.

        Argument validation stops most bad arguments in a run; the tool must cope with the rest.
        """
        schema = self.tool.tool_schema
        tried = list(samples(schema.function.parameters, self.calls[0]))
        arguments = [each for each in tried if not validate_arguments(schema, each)]
        raised: list[str] = []
        instance = await self._create()
        for call in arguments:
            try:
                problem = _result_problem(await self._execute(instance, call))
            except ToolCallError as fault:
                if fault.infrastructure:
                    return "wrong", f"{short_repr(call)} breaks the tool's backend: {fault}"
                continue
            except TimeoutError as fault:
                return "wrong", f"{short_repr(call)}: {fault}"
            except Exception as fault:
                raised.append(f"{short_repr(call)} raises {type(fault).__name__}: {fault}")
                continue
            if problem:
                return "wrong", f"{short_repr(call)}: {problem}"
        await self._with_timeout(self.tool.release(instance))
        if raised:
            return "warning", f"{len(raised)} of {len(arguments)}: {raised[0]}; return a helpful error message"
        return "ok", f"{len(tried)} tried, {len(arguments)} reached the tool, all were answered"

    async def cancellation(self) -> Outcome:
        """Cancel a call at once or a little later: it must end, and the tool must keep working."""
        ended = 0
        for after_s in (0.0, 0.05):
            instance = await self._create()
            call = asyncio.ensure_future(self.tool.execute(instance, self.calls[0]))
            await asyncio.sleep(after_s)
            call.cancel()
            await asyncio.wait({call}, timeout=GRACE_S)
            if not call.done():
                return "wrong", f"a cancelled call still runs {GRACE_S:g} s later: do not swallow CancelledError"
            ended += call.cancelled() or call.exception() is not None
            await self._with_timeout(self.tool.release(instance))
        again = await self._create()
        await self._execute(again, self.calls[0])
        await self._with_timeout(self.tool.release(again))
        if not ended:
            return "ok", "the call finished before it could be cancelled"
        return "ok", "a cancelled call ends, and the next one works"

    async def _solo_results(self) -> list[Any]:
        instance = await self._create()
        try:
            return [await self._execute(instance, call) for call in self.calls]
        finally:
            await self._with_timeout(self.tool.release(instance))

    async def _create(self, instance_id: str | None = None) -> str:
        return await self._with_timeout(self.tool.create(instance_id, **self.create_kwargs))

    async def _execute(self, instance: str, call: dict[str, Any]) -> Any:
        start = time.monotonic()
        try:
            return await self._with_timeout(self.tool.execute(instance, json.loads(json.dumps(call))))
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)

    async def _with_timeout(self, work: Coroutine[Any, Any, T]) -> T:
        return await run_with_deadline(self.timeout_s, work, TimeoutError(f"took longer than {self.timeout_s:g} s"))


def _result_problem(result: Any) -> str | None:
    if not isinstance(result, tuple) or len(result) != 3:
        return f"execute returned {result!r:.80}; return (text, reward or None, info)"
    text, reward, info = result
    if not isinstance(text, str):
        return f"execute returned the text {text!r:.80}; return a string"
    if not (reward is None or is_finite_number(reward)):
        return f"execute returned the reward {reward!r:.80}; return a finite number or None"
    if not isinstance(info, dict):
        return f"execute returned the info {info!r:.80}; return a dictionary"
    try:
        json.dumps(info)
    except (TypeError, ValueError) as fault:
        return f"execute returned an info that is not JSON-serializable: {fault}"
    return None
