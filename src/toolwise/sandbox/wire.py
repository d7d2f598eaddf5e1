"""Messages between the trainer and a worker: length-prefixed JSON frames on a separate descriptor, calls and answers.

What a worker sends is untrusted: types, sizes and ranges are checked.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from toolwise.messages import Message
from toolwise.rewards.results import fault_result, read_result
from toolwise.sandbox.faults import KINDS, MAX_TRACEBACK_CHARS, WorkerFault, read_fault, sanitize_text
from toolwise.types import EvaluateResult

HEADER = struct.Struct("!I")
_read, _write, _getpid, _exit = os.read, os.write, os.getpid, os._exit


def encode(value: Any) -> bytes:
    """Plain ASCII, so that lone surrogates survive. NaN and infinities are written as Python writes them."""
    return json.dumps(value, separators=(",", ":"), default=to_jsonable_python).encode("ascii")


def to_frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def read_exactly(descriptor: int, count: int) -> bytes:
    """Blocks; fewer bytes mean that the other side has closed."""
    parts: list[bytes] = []
    while count:
        part = _read(descriptor, min(count, 1 << 20))
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(descriptor, view) :]


class WorkerChannel:
    """A worker's end of the channel to the trainer."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._pid = descriptor, _getpid()

    def send(self, payload: bytes) -> None:
        if _getpid() != self._pid:  # a process forked by user code has returned into our code
            _exit(0)
        write_all(self.descriptor, to_frame(payload))

    def receive(self) -> bytes:
        """The next message. Once the trainer has closed the channel, this process ends."""
        head = read_exactly(self.descriptor, HEADER.size)
        if len(head) < HEADER.size:
            _exit(0)
        return read_exactly(self.descriptor, HEADER.unpack(head)[0])


class FrameReader:
    """Parses frames from a byte stream that may be hostile."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Any:
        """The next message, or None if it is not complete yet."""
        if len(self._buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > self.max_bytes:
            raise WorkerFault("too_big", f"the result has {length:,} bytes; the limit is {self.max_bytes:,}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            raise WorkerFault("bad_type", "the worker sent something that is not valid JSON") from None
        if not isinstance(message, dict):
            raise WorkerFault("bad_type", f"the worker sent a {type(message).__name__} instead of an object")
        return message

    @property
    def torn(self) -> bool:
        """Whether an incomplete frame is left."""
        return bool(self._buffer)


def pack(messages: Sequence[Any], ground_truth: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    plain = [m.to_openai() if isinstance(m, Message) else m for m in messages]
    return {"messages": plain, "ground_truth": ground_truth, "kwargs": kwargs}


def split_labels(request: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Separate the labels from the calls of a request. A batch request is one call and gets one label."""
    batch = request.get("batch")
    calls = (batch or request).get("calls") or []
    labels = [str(call.get("label", "")) for call in calls]
    plain = [{key: value for key, value in call.items() if key != "label"} for call in calls]
    if batch is None:
        return {**request, "calls": plain}, labels
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return {"batch": {**batch, "calls": plain}}, [f"{labels[0]}{more}" if labels else ""]


def protocol_fault() -> WorkerFault:
    return WorkerFault("bad_type", "the worker sent an unexpected message")


def encode_request(request: Any) -> bytes:
    try:
        return encode(request)
    except (TypeError, ValueError, RecursionError) as fault:
        raise WorkerFault("bad_type", f"the arguments cannot be sent as JSON: {fault}") from None


def read_answer(answer: Any, score_range: tuple[float, float] | None = None) -> EvaluateResult:
    """Parse an answer; anything invalid becomes a typed fault."""
    if isinstance(answer, dict) and "fault" in answer:
        return read_fault(answer["fault"]).result()
    text = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(text, str):
        return fault_result("bad_type", "the worker's answer is not a result")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return fault_result("bad_type", "the worker's answer is not valid JSON")
    try:
        result = (
            read_result(value) if isinstance(value, dict) else fault_result("bad_type", "the answer is not a result")
        )
    except Exception as fault:  # a forged answer can make anything fail; blame the answer
        return fault_result("bad_type", f"the worker's answer cannot be read: {type(fault).__name__}")
    return _in_range(_normalize_error(result), score_range)


def _normalize_error(result: EvaluateResult) -> EvaluateResult:
    """Keep the message of a fault that the function itself reports, but map its kind to a known one."""
    if result.error is None:
        return result
    kind = result.error.kind if result.error.kind in KINDS else "exception"
    traceback = sanitize_text(result.error.traceback, MAX_TRACEBACK_CHARS)
    fault = result.error.model_copy(update={"kind": kind, "traceback": traceback})
    return result.model_copy(update={"error": fault, "score": None, "is_score_valid": False})


def _in_range(result: EvaluateResult, score_range: tuple[float, float] | None) -> EvaluateResult:
    low, high = score_range or (-math.inf, math.inf)
    if not result.has_valid_score or result.score is None or low <= result.score <= high:
        return result
    return fault_result("out_of_range", f"the score is {result.score}; it must lie between {low} and {high}")
