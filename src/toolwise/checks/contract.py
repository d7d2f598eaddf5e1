"""What the checks of tools and environments share: findings, and running the parts of a contract one after another on a
watched event loop: code that blocks it is named."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolwise.concurrency import deadlines
from toolwise.types.findings import Finding, Verdict

HEARTBEAT_S = 0.05
_HINT = "; await, or use a thread"
_IDLE = ("selectors.py", "threading.py")
_ASYNC_PACKAGES = frozenset({"asyncio", "concurrent"})

Outcome = tuple[Verdict, str]
Parts = Mapping[str, Callable[[], Awaitable[Outcome]]]
"""The parts of a contract in order, by name."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    kind: Literal["tool", "env", "model"]
    name: str
    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            self.kind: self.name,
            "ok": self.ok,
            "findings": [
                {"name": f.name, "verdict": f.verdict, "says": f.says, **({"cure": f.cure} if f.cure else {})}
                for f in self.findings
            ],
        }


def run_parts(
    parts: Parts,
    *,
    essential: Iterable[str],
    explain: Callable[[Exception], str],
    limit_s: float,
    min_block_s: float,
    blocked: Literal["warning", "wrong"],
) -> list[Finding]:
    """Try every part; if an essential one is wrong, or the event loop stays blocked for `limit_s`, skip the rest.

    `explain` describes an exception of a part, or raises it again. A loop blocked for `min_block_s` is a finding with
    the verdict `blocked`.
    """
    findings: dict[str, Finding] = {}

    async def work() -> None:
        for name, part in parts.items():
            try:
                verdict, says = await part()
            except Exception as fault:  # user code may raise anything
                verdict, says = "wrong", explain(fault)
            findings[name] = Finding(name, verdict, " ".join(says.split())[:600])
            if verdict == "wrong" and name in essential:
                return

    loop = run_watched(work, limit_s=limit_s, min_block_s=min_block_s, blocked=blocked)
    tried = (findings.get(name, Finding(name, "skipped", "not tried")) for name in parts)
    return [*tried, Finding("event loop", *loop)]


def run_watched(
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    limit_s: float,
    min_block_s: float,
    blocked: Literal["warning", "wrong"],
) -> Outcome:
    """Run `work` to its end, or abandon it once it has blocked its loop for `limit_s`; return a verdict.

    Pauses shorter than `min_block_s` are blamed on the machine and ignored; longer ones have the verdict `blocked`.
    Exceptions from `work` propagate.
    """
    watch = _WatchedLoop(work)
    longest, where = 0.0, ""
    while watch.thread.is_alive():
        watch.thread.join(HEARTBEAT_S)
        blocked_s = time.monotonic() - watch.last_beat
        site = watch.blocking_site() if blocked_s > min_block_s else None
        if site is not None and blocked_s > max(limit_s, min_block_s):
            return "wrong", f"{site} blocked the event loop, and so all rollouts, for over {limit_s:g} s{_HINT}"
        if site is not None and not watch.work_ended:  # afterwards the loop is being closed, which takes its time
            longest, where = max((longest, where), (blocked_s, site))
    if watch.fault is not None:
        raise watch.fault
    if longest:
        return blocked, f"{where} blocked the event loop, and so all other rollouts, for {longest:.1f} s{_HINT}"
    return "ok", "never blocked"


class _WatchedLoop:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.last_beat = time.monotonic()
        self.fault: BaseException | None = None
        self.work_ended = False
        self._work = work
        self.thread = threading.Thread(target=self._run, name="toolwise-watched", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            deadlines.run(self._run_with_heartbeat())
        except BaseException as fault:
            self.fault = fault

    async def _run_with_heartbeat(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            await self._work()
        finally:
            self.work_ended = True
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)

    def blocking_site(self) -> str | None:
        """Code location of the loop's thread; None if it is idle."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None or Path(frame.f_code.co_filename).name in _IDLE:
            return None
        while frame is not None and _ASYNC_PACKAGES.intersection(Path(frame.f_code.co_filename).parts[-3:]):
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_qualname})" if frame else None


def is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def short_repr(value: Any) -> str:
    """`repr` on one line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
