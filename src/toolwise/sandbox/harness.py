"""Loads and calls the user's function inside the worker, and encodes the outcome as plain data.

The module keeps its own references to everything it calls, so that a patched `json` or `time` does not affect it. It
cannot stop a function from forging its own score: the trainer validates everything that leaves here.
"""

from __future__ import annotations

import errno
import inspect
import sys
import traceback as tracebacks
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.config.sibling_imports import siblings_of
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.messages import Message
from toolwise.rewards.function import Reward
from toolwise.rewards.results import read_result, read_results
from toolwise.sandbox.faults import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, sanitize_text
from toolwise.sandbox.layers.denial_hints import DISK_FULL_ERRNOS, explain
from toolwise.types import EvaluateResult

JsonDict = dict[str, Any]
_dump: Callable[..., str] = EvaluateResult.model_dump_json
_dump_base: Callable[..., bytes] = EvaluateResult.__pydantic_serializer__.to_json  # leaves out what a subclass adds
_is_sum: Callable[[EvaluateResult], bool] = EvaluateResult.is_sum_of_steps.fget  # type: ignore[attr-defined]
_format = tracebacks.format_exception
_message = Message.model_validate
_SHOWN_FRAMES = 8
MEMORY_FAULT = {"kind": "memory", "message": "it asked for more memory than memory_mb allows"}


@dataclass(slots=True)
class Harness:
    """A loaded user function."""

    reward: Reward
    allowed: tuple[str, ...] = ()
    """What the sandbox does not refuse; see denial_hints.py."""
    timeout_s: float | None = None
    """Deadline of an async call; set where no trainer kills this process for it (tier `off`)."""

    @classmethod
    def load(cls, reference: str, allowed: tuple[str, ...] = (), timeout_s: float | None = None) -> Harness:
        return cls(Reward.of(reference), allowed, timeout_s)

    def call_one(self, call: JsonDict) -> JsonDict:
        """Make a pointwise call; a batch or group function gets a list of one."""
        if self.reward.mode != "pointwise":
            return self.call_batch(
                {"calls": [call], "kwargs": call.get("kwargs") or {}, "lenient": call.get("lenient")}
            )[0]
        try:
            value = _run_awaitable(self._call(_messages(call), call["ground_truth"], call), self.timeout_s)
        except BaseException as fault:  # user code may raise anything, SystemExit included
            return plain_fault(fault, self.allowed)
        return _read_answers(value, 1)[0]

    async def call_one_async(self, call: JsonDict) -> JsonDict:
        """Like `call_one`, in a shared event loop."""
        try:
            value = self._call(_messages(call), call["ground_truth"], call)
            if inspect.isawaitable(value):
                value = await value
        except BaseException as fault:  # as above
            return plain_fault(fault, self.allowed)
        return _read_answers(value, 1)[0]

    def call_batch(self, batch: JsonDict) -> list[JsonDict]:
        """Call a batch or group function: one answer per rollout. A fault is repeated for all of them."""
        calls = batch["calls"]
        try:
            truths = [call["ground_truth"] for call in calls]
            truth = truths if self.reward.mode == "batch" else truths[0]  # the rollouts of a task share one
            value = _run_awaitable(self._call([_messages(call) for call in calls], truth, batch), self.timeout_s)
        except BaseException as fault:  # as above
            return [plain_fault(fault, self.allowed)] * len(calls)
        return _read_answers(value, len(calls), batch=True)

    def _call(self, messages: Any, truth: Any, request: JsonDict) -> Any:
        kwargs = request.get("kwargs") or {}
        accepted = self.reward.signature.accepted_kwargs(kwargs) if request.get("lenient") else kwargs
        assert self.reward.function is not None  # it was loaded here
        return self.reward.function(messages, truth, **accepted)


def _messages(call: JsonDict) -> list[Message]:
    return [_message(m) for m in call["messages"]]


class _CallTimeoutError(Exception):
    """An async call exceeded its deadline."""


def _run_awaitable(value: Any, timeout_s: float | None) -> Any:
    if not inspect.isawaitable(value):
        return value
    import asyncio  # lazily: most functions do not need it and a worker should start fast

    if timeout_s is None:
        return asyncio.run(_await_value(value))
    from toolwise.concurrency import deadlines

    return deadlines.run(
        deadlines.run_with_deadline(timeout_s, _await_value(value), _CallTimeoutError("it took too long to answer"))
    )


def _read_answers(value: Any, count: int, batch: bool = False) -> list[JsonDict]:
    """Encode what a function returned. An object that raises when inspected is a `bad_type` fault."""
    try:
        return [plain_result(result) for result in (read_results(value, count) if batch else [read_result(value)])]
    except MemoryError as fault:
        return [plain_fault(fault, ())] * count
    except BaseException as fault:
        message = sanitize_text(f"what it returned cannot be read: {describe_exception(fault)}", MAX_MESSAGE_CHARS)
        return [{"fault": {"kind": "bad_type", "message": message}}] * count


async def _await_value(value: Any) -> Any:
    return await value


def plain_result(result: EvaluateResult) -> JsonDict:
    """Encode a result, without the score if it was not given.

    A subclass is serialized through `EvaluateResult` itself, so that overrides cannot change what is written.
    """
    try:
        exclude_fields = {"score"} if _is_sum(result) else None
        if type(result) is EvaluateResult:
            return {"result": _dump(result, exclude=exclude_fields)}
        return {"result": _dump_base(result, exclude=exclude_fields).decode()}
    except Exception as fault:
        message = f"the result cannot be written as JSON: {describe_exception(fault)}"
        return {"fault": {"kind": "bad_type", "message": sanitize_text(message, 500)}}


def describe_exception(fault: BaseException) -> str:
    """One line about an exception, even if its `__str__` raises."""
    try:
        return f"{type(fault).__name__}: {fault}"
    except BaseException:
        return f"{type(fault).__name__} (its message cannot be read)"


def fault_kind(fault: BaseException, allowed: tuple[str, ...]) -> str:
    if isinstance(fault, MemoryError) or (isinstance(fault, OSError) and fault.errno == errno.ENOMEM):
        return "memory"
    if isinstance(fault, SystemExit):
        return "died"
    if isinstance(fault, _CallTimeoutError):
        return "timeout"
    if isinstance(fault, OSError) and fault.errno in DISK_FULL_ERRNOS:
        return "too_big"
    return "denied" if explain(fault, allowed) else "exception"


def plain_fault(fault: BaseException, allowed: tuple[str, ...], loading: bool = False) -> JsonDict:
    if loading and isinstance(fault, ConfigError) and isinstance(fault.__cause__, MemoryError):
        fault = fault.__cause__
    kind = fault_kind(fault, allowed)
    if kind == "memory":
        fault.__traceback__ = None  # frees whatever filled the memory
        return {"fault": MEMORY_FAULT}
    if kind == "timeout":
        return {"fault": {"kind": kind, "message": str(fault)}}
    message = str(fault) if loading and isinstance(fault, ToolwiseError) else describe_exception(fault)
    if kind == "died":
        message = f"it called sys.exit ({message})"
    if kind == "denied":
        message = f"{message}; {explain(fault, allowed)}"
    if kind == "exception" and loading:
        kind = "import"
    trace = sanitize_text(_format_traceback(fault, loading), MAX_TRACEBACK_CHARS)
    return {"fault": {"kind": kind, "message": sanitize_text(message, MAX_MESSAGE_CHARS), "traceback": trace}}


def _format_traceback(fault: BaseException, loading: bool) -> str:
    try:
        if loading and isinstance(fault, ConfigError) and fault.__cause__ is not None:
            fault = fault.__cause__
        return "".join(_format(fault, limit=-_SHOWN_FRAMES))
    except BaseException:
        return f"{type(fault).__name__} (its traceback cannot be read)\n"


def preload_package(top: JsonDict) -> None:
    """Import the top package of a dotted reference from its own folder, without adding its parent to sys.path."""
    import importlib.machinery
    import importlib.util

    name, origin, search_paths = top["name"], top.get("origin"), top.get("places")
    if name in sys.modules:
        return
    if origin is not None:
        spec = importlib.util.spec_from_file_location(name, Path(origin), submodule_search_locations=search_paths)
    else:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = search_paths
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    if origin is not None and search_paths is None:
        vars(module)["__builtins__"] = siblings_of(Path(origin)).builtins
    sys.modules[name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
