"""The thinking stage, between reward and credit: reads the levels of a step's rollouts, has the other levels think,
scores the actions under all of them, and hands on one `RolloutThinking` a rollout.

    scored ─► read ─► choose ─► write (alternatives.py) ─► score (scoring.py) ─► Deliberation
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from toolwise.protocols import Metrics
from toolwise.thinking.alternatives import AlternativeWriter
from toolwise.thinking.level_scores import score_levels
from toolwise.thinking.metrics import alternative_metrics, level_usage_metrics
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.step_selection import StepSelection, choose_steps, parse_steps, write_within_budget
from toolwise.types import (
    AnnotatedRollout,
    RolloutThinking,
    ScoredRollout,
    ThinkingByRollout,
    ThinkingGroup,
    ThinkingStep,
)


class ThinkingPrice(Protocol):
    """λ of thinking tokens, and the budget it goes by; `routing.budget.Multiplier` is one."""

    value: float

    def observe(self, costs: Iterable[float]) -> None: ...

    def step(self) -> bool: ...

    def metrics(self, prefix: str = ...) -> Metrics: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What is thought over again, and for how many tokens."""

    selection: StepSelection = "all"
    share: float = 1.0
    max_added_tokens: float | None = 1.0
    """Generated tokens for alternatives at most, in multiples of what the rollouts sampled."""
    success_score: float | None = None
    price: float = 0.0
    """λ where no budget moves it."""
    total_steps: int = 1
    """Training steps of the run: diversity is annealed over them."""
    seed: int = 0


class ThinkingStage:
    """One for a run. `think` gives what estimators read, and the figures; λ survives a crash."""

    def __init__(self, writer: AlternativeWriter, settings: StageSettings, price: ThinkingPrice | None = None) -> None:
        self.writer = writer
        self.settings = settings
        self.price = price

    @property
    def current_price(self) -> float:
        return self.settings.price if self.price is None else self.price.value

    async def think(
        self, scored: Sequence[ScoredRollout], usable: Sequence[ScoredRollout], *, training_step: int
    ) -> tuple[ThinkingByRollout, Metrics]:
        """`usable` are those of `scored` that will be learned from: only their steps are thought over again."""
        began, counted = time.perf_counter(), self.writer.model.counters()
        s, codec = self.settings, self.writer.codec
        steps = parse_steps(scored, codec)
        kept = {u.rollout.rollout_id for u in usable}
        wanted = choose_steps(
            [step for step in steps if step.rollout_id in kept],
            usable,
            selection=s.selection,
            share=s.share,
            success_score=s.success_score,
            seed=f"{s.seed}/{training_step}",
        )
        sampled = sum(u.rollout.usage.sampled_tokens for u in scored)
        allowed = None if s.max_added_tokens is None else int(s.max_added_tokens * sampled)
        chosen, alternatives = await write_within_budget(self.writer, wanted, allowed, training_step=training_step)
        wrote = time.perf_counter()
        found = await score_levels(
            self.writer.model, codec, chosen, alternatives, temperature=self.writer.sampling.temperature
        )
        groups = dict(zip(map(_key, chosen), found.groups, strict=True))
        times = {"time/alternatives_s": wrote - began, "time/level_scores_s": time.perf_counter() - wrote}
        figures = level_usage_metrics(steps) | alternative_metrics(chosen, alternatives, found, sampled) | times
        figures |= {f"thinking/{k}": v - counted.get(k, 0.0) for k, v in self.writer.model.counters().items()}
        figures |= self._observe_cost(steps)
        return self._thinking_by_rollout(usable, steps, groups, training_step), figures

    def measure(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """Levels and thinking tokens of rollouts that are not learned from, such as a validation's."""
        return level_usage_metrics(parse_steps(scored, self.writer.codec))

    def _observe_cost(self, steps: Sequence[ParsedStep]) -> Metrics:
        """What was spent moves the price of the next step; this one's credit is still at the old."""
        figures = {"thinking/lambda": self.current_price}
        if self.price is not None:
            self.price.observe([float(step.thinking_tokens) for step in steps])
            own = self.price.metrics("thinking")  # thinking/tokens/budget, …
            figures |= {name: value for name, value in own.items() if not name.endswith("/lambda")}
        return figures

    def _thinking_by_rollout(
        self,
        usable: Sequence[ScoredRollout],
        steps: Sequence[ParsedStep],
        groups: dict[tuple[str, int], ThinkingGroup | None],
        training_step: int,
    ) -> ThinkingByRollout:
        read: dict[str, dict[int, ParsedStep]] = defaultdict(dict)
        for step in steps:
            read[step.rollout_id][step.index] = step
        anneal = max(0.0, 1.0 - training_step / max(1, self.settings.total_steps))
        price = self.current_price
        return {
            u.rollout.rollout_id: RolloutThinking(
                tuple(
                    _thinking_step(read[u.rollout.rollout_id].get(index), groups.get((u.rollout.rollout_id, index)))
                    for index in range(len(u.steps))
                ),
                price,
                anneal,
            )
            for u in usable
        }

    def end_step(self) -> None:
        """Ends a training step: λ moves by what was spent."""
        if self.price is not None:
            self.price.step()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.price is None else {"price": self.price.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.price is not None and "price" in state:
            self.price.load_state_dict(state["price"])


def attach_thinking(annotated: Sequence[AnnotatedRollout], thought: ThinkingByRollout) -> list[AnnotatedRollout]:
    """The same rollouts with what the other levels would have thought."""
    return [replace(a, thinking=thought.get(a.scored.rollout.rollout_id)) for a in annotated]


def _key(step: ParsedStep) -> tuple[str, int]:
    return step.rollout_id, step.index


def _thinking_step(step: ParsedStep | None, group: ThinkingGroup | None) -> ThinkingStep:
    if step is None:
        return ThinkingStep(None, 0, 0)
    said = step.spans.level.stop if step.spans.level else None
    return ThinkingStep(step.reading.level, step.thinking_tokens, len(step.spans.head), group, said)
