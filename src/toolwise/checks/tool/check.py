"""`check_tool`: tests whether a tool meets the contract that rollouts rely on: its schema, then trial calls."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from toolwise.checks import example_values
from toolwise.checks.contract import CheckReport, Outcome, Parts, is_finite_number, run_parts, short_repr
from toolwise.concurrency.deadlines import GRACE_S, run_with_deadline
from toolwise.errors import ToolwiseError
from toolwise.tools.base import BaseTool, FunctionSchema
from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.function import check_tool_options
from toolwise.tools.schema import validate_arguments
from toolwise.types.findings import Finding
from toolwise.untrusted.json_schema import compile_parameters

T = TypeVar("T")
MIN_BLOCK_S = 0.5
CONCURRENT_INSTANCES = 8
MAX_RESULT_CHARS = 4000
"""Default number of characters of a result that a model reads."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NONDETERMINISTIC = "cannot be tested: equal calls give different results even on a single instance"


def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[dict[str, Any]] = (),
    create_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> CheckReport:
    """Test a tool: schema, life cycle, valid, unusual and invalid arguments, concurrent instances and cancellation.

    `calls` are arguments to call it with; by default, minimal arguments are generated from the schema. `create_kwargs`
    are what a task would pass to `create`.
    """
    findings = _check_schema(tool)
    if findings[-1].verdict != "wrong":
        examples = list(calls) or [example_values.example_value(tool.tool_schema.function.parameters)]
        if invalid := [(call, faults) for call in examples if (faults := validate_arguments(tool.tool_schema, call))]:
            call, faults = invalid[0]
            hint = "correct --call" if calls else "give an example with --call"
            says = f"{json.dumps(call)} does not fit the schema: {'; '.join(faults)}; {hint}"
            findings.append(Finding("calls", "wrong", says))
        else:
            hint = "" if calls else "; the arguments were generated from the schema: give a working example with --call"
            findings += _try_calls(ToolTrial(tool, examples, dict(create_kwargs or {}), timeout_s), hint)
    return CheckReport("tool", tool.name, findings)


def _check_schema(tool: BaseTool) -> list[Finding]:
    """Check what needs no call."""
    function = tool.tool_schema.function
    valid_name = _NAME.fullmatch(function.name) is not None
    name = function.name if valid_name else f"{function.name!r}: use 1 to 64 letters, digits, _ or -"
    description = function.description or "missing; models choose tools by their description"
    return [
        Finding("name", "ok" if valid_name else "wrong", name),
        Finding("description", "ok" if function.description else "warning", " ".join(description.split())[:400]),
        Finding("terms", *_check_terms(tool)),
        Finding("schema", *_check_parameters(function)),
    ]


def _check_terms(tool: BaseTool) -> Outcome:
    try:
        check_tool_options({"family": tool.family, "price": tool.price}, "it")
    except ToolwiseError as error:
        return "wrong", str(error)
    return "ok", f"family {tool.family}, price {tool.price:g}"


def _check_parameters(function: FunctionSchema) -> Outcome:
    parameters = function.parameters
    properties = parameters.get("properties") or {}
    try:
        compile_parameters(function.name, json.dumps(parameters, sort_keys=True))
    except (ToolwiseError, TypeError, ValueError) as error:
        return "wrong", str(error)
    if parameters.get("type") != "object":
        return "wrong", f"the parameters are of type {parameters.get('type')!r}; arguments are always an object"
    if unknown := [name for name in parameters.get("required") or () if name not in properties]:
        return "wrong", f"required, but not in properties: {', '.join(unknown)}"
    if missing := [
        n for n, schema in properties.items() if not isinstance(schema, dict) or not schema.get("description")
    ]:
        return "warning", f"no description: {', '.join(missing)}"
    return "ok", f"{len(properties)} arguments, {len(parameters.get('required') or ())} required"


def _try_calls(trial: ToolTrial, hint: str) -> list[Finding]:
    findings = run_parts(
        trial.parts(),
        essential={"life cycle", "results"},
        explain=lambda fault: f"{type(fault).__name__}: {str(fault)[:200]}{hint}",
        limit_s=trial.timeout_s,
        min_block_s=MIN_BLOCK_S,
        blocked="wrong",
    )
    says = f"the slowest call took {trial.slowest_s:.3f} s of {trial.timeout_s:g} s"
    return [*findings, Finding("time", "ok", says)]


@dataclass(slots=True)
class ToolTrial:
    """One tool and the calls to try it with; each part tests one part of the contract."""

    tool: BaseTool
    calls: list[dict[str, Any]]
    create_kwargs: dict[str, Any]
    timeout_s: float
    slowest_s: float = 0.0
    _solo_texts: list[str] = field(default_factory=list)
    """Results of the calls in sequence on a single instance."""
    _deterministic: bool = True

    def parts(self) -> Parts:
        return {
            "life cycle": self._life_cycle,
            "results": self._results,
            "equal calls": self._equal_calls,
            "instances": self._instances,
            "together": self._concurrent_instances,
            "odd arguments": partial(self._try_arguments, example_values.odd_arguments),
            "bad arguments": partial(self._try_arguments, example_values.bad_arguments),
            "cancelling": self._cancellation,
        }

    async def _life_cycle(self) -> Outcome:
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
        await self._release(first)
        await self._execute(second, self.calls[0])  # the end of one rollout must not affect another
        await self._release(second)
        try:
            await self._release(second)
        except Exception as fault:
            return "wrong", f"release fails if the instance is already released: {type(fault).__name__}: {fault}"
        async with self._instance("my-id") as named:
            if named != "my-id":
                return "warning", f"create('my-id') returned {named!r:.80}; return the given id"
        return "ok", f"create, execute, calc_reward ({reward}), release"

    async def _results(self) -> Outcome:
        results = await self._solo_results()
        if problem := _first_problem(results):
            return "wrong", problem
        if (longest := max(len(text) for text, _, _ in results)) > MAX_RESULT_CHARS:
            return "warning", f"{longest} characters; models read only the first {MAX_RESULT_CHARS}: return less"
        return "ok", f"texts of up to {longest} characters"

    async def _equal_calls(self) -> Outcome:
        self._solo_texts = [result[0] for result in await self._solo_results()]
        if await self._is_deterministic():
            return "ok", "new instances give the same results"
        return "warning", "new instances give different results: randomness, the clock, or shared state"

    async def _is_deterministic(self) -> bool:
        """Rerun before blaming other instances: a tool that reads the clock can repeat itself for a while."""
        if self._deterministic:
            self._deterministic = [result[0] for result in await self._solo_results()] == self._solo_texts
        return self._deterministic

    async def _instances(self) -> Outcome:
        """Interleave calls on two instances: neither may affect the other."""
        if not self._deterministic:
            return "warning", _NONDETERMINISTIC
        texts: tuple[list[str], list[str]] = ([], [])
        async with self._instance() as first, self._instance() as second:
            for call in self.calls * 2:
                for instance, instance_texts in zip((first, second), texts, strict=True):
                    instance_texts.append((await self._execute(instance, call))[0])
        if texts[0] != texts[1] or texts[0][: len(self._solo_texts)] != self._solo_texts:
            if not await self._is_deterministic():
                return "warning", _NONDETERMINISTIC
            return "wrong", "two instances affect each other: keep state per instance_id"
        return "ok", "two instances do not affect each other"

    async def _concurrent_instances(self) -> Outcome:
        runs = await asyncio.gather(*(self._solo_results() for _ in range(CONCURRENT_INSTANCES)))
        if problem := _first_problem(result for run in runs for result in run):
            return "wrong", problem
        differ = self._deterministic and any([result[0] for result in run] != self._solo_texts for run in runs)
        if differ and await self._is_deterministic():
            return "wrong", f"{CONCURRENT_INSTANCES} concurrent instances give other results than a single one"
        return "ok", f"{CONCURRENT_INSTANCES} concurrent instances"

    async def _try_arguments(self, samples: Callable[..., Iterable[dict[str, Any]]]) -> Outcome:
        """An error message is fine; an exception is a warning (the model reads it as is); anything else is wrong.

        Argument validation stops most bad arguments in a run; the tool must cope with the rest.
        """
        schema = self.tool.tool_schema
        tried = list(samples(schema.function.parameters, self.calls[0]))
        arguments = [each for each in tried if not validate_arguments(schema, each)]
        raised: list[str] = []
        async with self._instance() as instance:
            for call in arguments:
                try:
                    problem = _result_problem(await self._execute(instance, call))
                except ToolCallError as fault:
                    if fault.infrastructure:
                        return "wrong", f"{short_repr(call)} breaks the tool's backend: {fault}"
                    continue
                except TimeoutError as fault:
                    problem = str(fault)
                except Exception as fault:
                    raised.append(f"{short_repr(call)} raises {type(fault).__name__}: {fault}")
                    continue
                if problem:
                    return "wrong", f"{short_repr(call)}: {problem}"
        if raised:
            return "warning", f"{len(raised)} of {len(arguments)}: {raised[0]}; return a helpful error message"
        return "ok", f"{len(tried)} tried, {len(arguments)} reached the tool, all were answered"

    async def _cancellation(self) -> Outcome:
        """Cancel a call at once or a little later: it must end, and the tool must keep working."""
        ended = 0
        for after_s in (0.0, 0.05):
            async with self._instance() as instance:
                call = asyncio.ensure_future(self.tool.execute(instance, self.calls[0]))
                await asyncio.sleep(after_s)
                call.cancel()
                await asyncio.wait({call}, timeout=GRACE_S)
                if not call.done():
                    return "wrong", f"a cancelled call still runs {GRACE_S:g} s later: do not swallow CancelledError"
                ended += call.cancelled() or call.exception() is not None
        async with self._instance() as again:
            await self._execute(again, self.calls[0])
        works = "a cancelled call ends, and the next one works"
        return "ok", works if ended else "the call finished before it could be cancelled"

    async def _solo_results(self) -> list[Any]:
        async with self._instance() as instance:
            return [await self._execute(instance, call) for call in self.calls]

    @asynccontextmanager
    async def _instance(self, instance_id: str | None = None) -> AsyncIterator[str]:
        instance = await self._create(instance_id)
        try:
            yield instance
        finally:
            await self._release(instance)

    async def _create(self, instance_id: str | None = None) -> str:
        return await self._with_timeout(self.tool.create(instance_id, **self.create_kwargs))

    async def _release(self, instance: str) -> None:
        await self._with_timeout(self.tool.release(instance))

    async def _execute(self, instance: str, call: dict[str, Any]) -> Any:
        start = time.monotonic()
        try:
            return await self._with_timeout(self.tool.execute(instance, json.loads(json.dumps(call))))
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)

    async def _with_timeout(self, work: Coroutine[Any, Any, T]) -> T:
        return await run_with_deadline(self.timeout_s, work, TimeoutError(f"took longer than {self.timeout_s:g} s"))


def _first_problem(results: Iterable[Any]) -> str | None:
    return next(filter(None, map(_result_problem, results)), None)


def _result_problem(result: Any) -> str | None:
    if not isinstance(result, tuple) or len(result) != 3:
        return f"execute returned {result!r:.80}; return (text, reward or None, info)"
    text, reward, info = result
    for valid, what, value, wanted in (
        (isinstance(text, str), "text", text, "a string"),
        (reward is None or is_finite_number(reward), "reward", reward, "a finite number or None"),
        (isinstance(info, dict), "info", info, "a dictionary"),
    ):
        if not valid:
            return f"execute returned the {what} {value!r:.80}; return {wanted}"
    try:
        json.dumps(info)
    except (TypeError, ValueError) as fault:
        return f"execute returned an info that is not JSON-serializable: {fault}"
    return None
