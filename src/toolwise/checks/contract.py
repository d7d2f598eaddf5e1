"""What the checks of tools and environments share: findings, and running the parts of a contract one after another."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolwise.checks.loop_blocking import run_watched
from toolwise.types.findings import Finding, Verdict

Outcome = tuple[Verdict, str]
Parts = Mapping[str, Callable[[], Awaitable[Outcome]]]
"""The parts of a contract in order, by name."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings about one tool or environment."""

    kind: Literal["tool", "env"]
    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        findings = [{"name": f.name, "verdict": f.verdict, "says": f.says} for f in self.findings]
        return {self.kind: self.name, "ok": self.ok, "findings": findings}


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
                outcome = await part()
            except Exception as fault:  # user code may raise anything
                outcome = "wrong", explain(fault)
            findings[name] = Finding(name, outcome[0], " ".join(outcome[1].split())[:600])
            if outcome[0] == "wrong" and name in essential:
                return

    loop = run_watched(work, limit_s=limit_s, min_block_s=min_block_s, blocked=blocked)
    tried = [findings.get(name, Finding(name, "skipped", "not tried")) for name in parts]
    return [*tried, Finding("event loop", *loop)]


def is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def short_repr(value: Any) -> str:
    """`repr` on one line, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
