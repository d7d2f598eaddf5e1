"""`Sandbox`: calls reward functions in worker processes, so that none of them can harm or end a run. And the executors
that score rollouts in it, with the same arguments for reward functions as `InProcessExecutor`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from toolwise.concurrency import deadlines
from toolwise.errors import RewardError
from toolwise.rewards.executor import (
    EPISODE_REWARDS,
    InProcessExecutor,
    batch_task_kwargs,
    evaluate_groups,
    run_kwargs,
    score_episodes,
    task_kwargs,
)
from toolwise.rewards.function import Reward, Signature
from toolwise.rewards.printed_output import PrintCallback
from toolwise.sandbox.async_calls import run_overlapping
from toolwise.sandbox.base_sandbox import LIVE_SANDBOXES, BaseSandbox
from toolwise.sandbox.dispatch import MAX_OVERLAPPING_CALLS, run_batch, run_pointwise
from toolwise.sandbox.faults import SandboxError, WorkerFault
from toolwise.sandbox.harness import Harness, JsonDict, plain_fault
from toolwise.sandbox.layers.denial_hints import ALL_ALLOWED
from toolwise.sandbox.layers.hardening import LAYERS, Tier
from toolwise.sandbox.pool import Pool, PrintForwarder
from toolwise.sandbox.report import probe
from toolwise.sandbox.targets import Target, reference_of, resolve
from toolwise.sandbox.wire import encode_request, pack, read_answer
from toolwise.types import EvaluateResult, Rollout

log = logging.getLogger("toolwise.sandbox")
MAX_CPU_S = 24 * 3600
T = TypeVar("T")


class Sandbox(BaseSandbox, AbstractContextManager["Sandbox"]):
    """Runs untrusted reward functions. One sandbox per run; thread-safe.

    `timeout_s` limits one call of the function, including its import; `memory_mb` is what it may allocate on top of the
    worker's own memory; `read` adds files and folders that it may read.
    """

    def __init__(
        self,
        tier: Tier = "standard",
        *,
        timeout_s: float = 30.0,
        memory_mb: int = 1024,
        read: Iterable[str | Path] = (),
        require: bool = False,
        permissions: Iterable[str] = (),
        max_calls: int = 10_000,
        workers: int | None = None,
        file_mb: int = 64,
        score_range: tuple[float, float] | None = None,
    ) -> None:
        report = probe(tier, permissions, require=require)
        if timeout_s <= 0 or memory_mb <= 0 or max_calls <= 0:
            raise SandboxError("a sandbox's timeout_s, memory_mb and max_calls must be greater than 0")
        cpu_s = int(min(MAX_CPU_S, timeout_s * max_calls + 60))
        super().__init__(report, LAYERS[tier], read, memory_mb=memory_mb, file_mb=file_mb, cpu_s=cpu_s)
        self.timeout_s, self.require, self.score_range = timeout_s, require, score_range
        self._prints = PrintForwarder()
        self._pool = Pool(
            self._plan,
            workers=workers or max(1, min(8, os.cpu_count() or 1)),
            max_calls=max_calls,
            timeout_s=timeout_s,
            require=require,
            on_print=self._prints,
        )
        self._start_threads()
        self._targets: dict[tuple[str, str], Target] = {}
        self._signatures: dict[str, Signature] = {}
        self._loaded: dict[str, Harness] = {}
        if tier == "off" or not report.complete:
            log.warning("%s", report)
        LIVE_SANDBOXES.add(self)

    @property
    def on_print(self) -> PrintCallback | None:
        """Callback for what functions print: a label and a text per call, from the thread that ran it."""
        return self._prints.on_print

    @on_print.setter
    def on_print(self, on_print: PrintCallback | None) -> None:
        self._prints.set(on_print)

    def describe(self) -> str:
        """The report in one line."""
        return str(self.report())

    def evaluate(
        self, ref: str | Callable[..., Any], messages: Sequence[Any], ground_truth: Any, **kwargs: Any
    ) -> EvaluateResult:
        """Score one rollout with the function `ref`."""
        return self.run_calls(ref, [pack(messages, ground_truth, kwargs)])[0]

    def evaluate_batch(
        self,
        ref: str | Callable[..., Any],
        rollouts_messages: Sequence[Sequence[Any]],
        ground_truths: Sequence[Any],
        **kwargs: Any,
    ) -> list[EvaluateResult]:
        """Score many rollouts: in one call for a batch function, else one by one over all workers."""
        if len(rollouts_messages) != len(ground_truths):
            raise SandboxError(f"got {len(rollouts_messages)} rollouts but {len(ground_truths)} ground truths")
        calls = [pack(m, t, kwargs) for m, t in zip(rollouts_messages, ground_truths, strict=True)]
        return self.run_calls(ref, calls, batch_kwargs=kwargs)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking `work` without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def signature_of(self, ref: str | Callable[..., Any]) -> Signature:
        """The function's signature, from the worker that loaded it. Raises `RewardError` if it cannot be loaded."""
        reference = ref if isinstance(ref, str) else reference_of(ref)
        if self.tier == "off":
            return Harness.load(reference).reward.signature
        try:
            return self._signature(self._target(reference))
        except WorkerFault as fault:
            message = fault.message if fault.message.startswith("reward") else f"reward {reference}: {fault.message}"
            kind = "" if fault.kind == "import" else f" ({fault.kind}, in the sandbox)"
            raise RewardError(" ".join(f"{message}{kind}".split())) from None

    def run_calls(
        self,
        ref: str | Callable[..., Any],
        calls: Sequence[JsonDict],
        batch_kwargs: JsonDict | None = None,
        *,
        lenient: bool = False,
    ) -> list[EvaluateResult]:
        """One result per call, in order, whatever happens. `lenient` drops arguments that the function does not accept.

        With `batch_kwargs`, a batch function gets all calls at once, with these arguments instead of the calls' own.
        """
        if not calls:
            return []
        reference = ref if isinstance(ref, str) else reference_of(ref)
        calls = [{**call, "lenient": True} for call in calls] if lenient else list(calls)
        batch = {"calls": calls, "kwargs": batch_kwargs or {}, "lenient": lenient} if batch_kwargs is not None else None
        try:
            answers = (
                self._run_in_process(reference, calls, batch)
                if self.tier == "off"
                else self._run_in_workers(reference, calls, batch)
            )
        except WorkerFault as fault:
            return [fault.result() for _ in calls]
        return [read_answer(answer, self.score_range) for answer in answers]

    def _run_in_workers(self, reference: str, calls: list[JsonDict], batch: JsonDict | None) -> list[Any]:
        target = self._target(reference)
        signature = self._signatures.get(target.reference)
        if batch is not None and (signature is None or signature.mode != "pointwise"):
            answers = run_batch(self._pool, target, batch, self.timeout_s)
            if answers is not None:
                return answers
        overlap = len(calls) > 1 and self._signature(target).is_async
        return run_pointwise(self._pool, target, calls, self.timeout_s, self._threads, overlap=overlap)

    def _signature(self, target: Target) -> Signature:
        """Cached; comes from a worker, since only workers load the function."""
        if target.reference not in self._signatures:
            with self._pool.worker(target) as worker:
                assert worker.signature is not None  # a worker from the pool has loaded its function
                self._signatures[target.reference] = worker.signature
        return self._signatures[target.reference]

    def _target(self, reference: str) -> Target:
        """Resolved once per working directory: a run does not follow files that move."""
        key = (reference, os.getcwd())
        if key not in self._targets:
            self._targets[key] = resolve(reference)
        return self._targets[key]

    def _run_in_process(self, reference: str, calls: list[JsonDict], batch: JsonDict | None) -> list[Any]:
        """Run in this process (tier `off`). Arguments still go through JSON, so that nothing is shared."""
        calls, batch = json.loads(encode_request([calls, batch]))
        try:
            if reference not in self._loaded:
                self._loaded[reference] = Harness.load(reference, ALL_ALLOWED, self.timeout_s)
        except Exception as fault:
            return [plain_fault(fault, ALL_ALLOWED, loading=True)] * len(calls)
        harness = self._loaded[reference]
        if batch is not None and harness.reward.mode != "pointwise":
            return harness.call_batch(batch)
        if len(calls) == 1 or not harness.reward.signature.is_async:
            return [harness.call_one(call) for call in calls]
        answers: list[JsonDict] = []
        for start in range(0, len(calls), MAX_OVERLAPPING_CALLS):
            part_answers: dict[int, JsonDict] = {}
            part = calls[start : start + MAX_OVERLAPPING_CALLS]
            run_overlapping(harness, part, self.timeout_s, part_answers.__setitem__, deadlines.run)
            answers += [part_answers[position] for position in sorted(part_answers)]
        return answers

    def _start_threads(self) -> None:
        self._threads = ThreadPoolExecutor(2 * self._pool.workers, thread_name_prefix="toolwise-sandbox")

    @property
    def left_running(self) -> int:
        """Number of processes that functions left running so far; they were killed with their workers."""
        return self._pool.left_running

    def pids(self) -> list[int]:
        """The running worker processes."""
        return self._pool.pids()

    def close(self) -> None:
        """End all workers. Calls in progress return a `died` fault."""
        if self._pool.pid == os.getpid():
            self._pool.close()
        self._threads.shutdown(wait=False)

    def _after_fork(self) -> None:
        self._start_threads()
        self._pool.abandon()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RewardExecutor:
    """Runs rewards that are loaded in this process here and all others in the sandbox; looks up episode rewards."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self.sandbox = sandbox

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        if reward.reference in EPISODE_REWARDS:
            return score_episodes(reward.reference, rollouts)
        if reward.function is not None:
            on_print = self.sandbox.on_print if self.sandbox is not None else None
            return await InProcessExecutor(on_print).evaluate(reward, rollouts, step=step)
        assert self.sandbox is not None  # a reward given only by reference needs a sandbox
        return await SandboxExecutor(self.sandbox).evaluate(reward, rollouts, step=step)


class SandboxExecutor:
    """A `protocols.Executor` over a sandbox. A function object is located by its file."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def evaluate(self, reward: Reward, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        calls = []
        for r in rollouts:
            kwargs = {**run_kwargs(reward, step, r.prompt_length), **task_kwargs(reward, r.task), **reward.kwargs}
            label = f"step {step}, {r.rollout_id}"
            calls.append({**pack(r.messages, r.task.ground_truth, kwargs), "label": label})
        if reward.mode == "group":
            return await evaluate_groups(
                rollouts, lambda group: self._run(reward, [calls[i] for i in group], calls[group[0]]["kwargs"])
            )
        batch: dict[str, Any] | None = None
        if reward.mode == "batch":
            kwargs_of_run = run_kwargs(reward, step, [r.prompt_length for r in rollouts])
            batch = {**kwargs_of_run, **batch_task_kwargs(reward, rollouts), **reward.kwargs}
        return await self._run(reward, calls, batch)

    async def _run(
        self, reward: Reward, calls: list[dict[str, Any]], batch: dict[str, Any] | None
    ) -> list[EvaluateResult]:
        source = reward.reference if reward.reference is not None else reward.function
        assert source is not None  # a reward has a reference or a function
        return await self.sandbox.run_in_thread(lambda: self.sandbox.run_calls(source, calls, batch, lenient=True))
