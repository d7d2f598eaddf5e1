"""The thinking stage, between reward and advantage: parses the levels of a training step's rollouts, generates thoughts
at the other levels, scores the actions under all levels, and returns one `RolloutThinking` per rollout.

    scored rollouts ─► parse_steps ─► choose_steps ─► AlternativeWriter ─► score_levels ─► RolloutThinking
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from toolwise.config.algorithm import RlvcrConfig
from toolwise.protocols import Metrics, Stateful
from toolwise.thinking.alternatives import AlternativeWriter, mentions_action
from toolwise.thinking.format_metrics import format_metrics, level_shares
from toolwise.thinking.level_scores import LevelScores, score_levels
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.step_selection import choose_steps, parse_steps, write_within_budget
from toolwise.types import (
    Alternative,
    RolloutThinking,
    ScoredRollout,
    ThinkingByRollout,
    ThinkingGroup,
    ThinkingStep,
)


class DualVariable(Stateful, Protocol):
    """λ, the penalty per thinking token, driven by a token budget; `routing.budget.Multiplier` implements it."""

    @property
    def value(self) -> float: ...

    def observe(self, costs: Iterable[float]) -> None: ...

    def step(self) -> bool: ...

    def metrics(self, prefix: str = ...) -> Metrics: ...


class ThinkingStage:
    """One per run. `think` returns what estimators read, and metrics; λ is saved in checkpoints.

    `price` is the λ of a budget, if there is one; diversity is annealed over the run's `total_steps`.
    """

    def __init__(
        self,
        writer: AlternativeWriter,
        config: RlvcrConfig,
        price: DualVariable | None = None,
        *,
        total_steps: int = 1,
        seed: int = 0,
    ) -> None:
        self.writer = writer
        self.config = config
        self.price = price
        self.total_steps, self.seed = total_steps, seed

    @property
    def current_lambda(self) -> float:
        return self.config.budget.price if self.price is None else self.price.value

    async def think(
        self, scored: Sequence[ScoredRollout], usable: Sequence[ScoredRollout], *, training_step: int
    ) -> tuple[ThinkingByRollout, Metrics]:
        """`usable` are the rollouts of `scored` that will be trained on: only their steps get alternatives."""
        start, counters_before = time.perf_counter(), self.writer.model.counters()
        config, codec = self.config, self.writer.codec
        steps = parse_steps(scored, codec)
        candidates = choose_steps(
            steps,
            usable,
            selection=config.steps,
            share=config.share,
            success_score=config.success_score,
            seed=f"{self.seed}/{training_step}",
        )
        sampled = sum(u.rollout.usage.sampled_tokens for u in scored)
        max_tokens = int(config.max_added_tokens * sampled) if config.max_added_tokens else None
        chosen, alternatives = await write_within_budget(
            self.writer, candidates, max_tokens, training_step=training_step
        )
        written_at = time.perf_counter()
        level_scores = await score_levels(
            self.writer.model, codec, chosen, alternatives, temperature=self.writer.sampling.temperature
        )
        groups = {(step.rollout_id, step.index): group for step, group in zip(chosen, level_scores.groups, strict=True)}
        metrics = level_usage_metrics(steps) | alternative_metrics(chosen, alternatives, level_scores, sampled)
        metrics |= {"time/alternatives_s": written_at - start, "time/level_scores_s": time.perf_counter() - written_at}
        metrics |= {f"thinking/{k}": v - counters_before.get(k, 0.0) for k, v in self.writer.model.counters().items()}
        metrics |= self._observe_cost(steps)
        return self._thinking_by_rollout(usable, steps, groups, training_step), metrics

    def measure(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """Levels and thinking tokens of rollouts that are not trained on, such as in validation."""
        return level_usage_metrics(parse_steps(scored, self.writer.codec))

    def _observe_cost(self, steps: Sequence[ParsedStep]) -> Metrics:
        """Record the tokens spent: they move λ for the next training step; this one still uses the current value."""
        metrics = {"thinking/lambda": self.current_lambda}
        if self.price is not None:
            self.price.observe([float(step.thinking_tokens) for step in steps])
            budget_metrics = self.price.metrics("thinking")  # thinking/tokens/budget, …
            metrics |= {name: value for name, value in budget_metrics.items() if not name.endswith("/lambda")}
        return metrics

    def _thinking_by_rollout(
        self,
        usable: Sequence[ScoredRollout],
        steps: Sequence[ParsedStep],
        groups: dict[tuple[str, int], ThinkingGroup | None],
        training_step: int,
    ) -> ThinkingByRollout:
        parsed = {(step.rollout_id, step.index): step for step in steps}
        anneal = max(0.0, 1.0 - training_step / max(1, self.total_steps))
        by_rollout = {}
        for name, count in ((u.rollout.rollout_id, len(u.steps)) for u in usable):
            keys = [(name, index) for index in range(count)]
            thinking = tuple(_thinking_step(parsed.get(key), groups.get(key)) for key in keys)
            charged = self.config.subtract_thinking_cost
            summed = bool(self.config.budget.unit)
            by_rollout[name] = RolloutThinking(thinking, self.current_lambda, anneal, charged, summed)
        return by_rollout

    def end_step(self) -> None:
        """End a training step: update λ from the tokens spent."""
        if self.price is not None:
            self.price.step()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.price is None else {"price": self.price.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.price is not None and "price" in state:
            self.price.load_state_dict(state["price"])


def _thinking_step(step: ParsedStep | None, group: ThinkingGroup | None) -> ThinkingStep:
    if step is None:
        return ThinkingStep(None, 0, 0)
    level_end = step.spans.level.stop if step.spans.level else None
    return ThinkingStep(step.reply.level, step.thinking_tokens, len(step.spans.head), group, level_end)


def level_usage_metrics(steps: Sequence[ParsedStep]) -> Metrics:
    """Level usage over all steps, and per kind of step if the environment reports kinds."""
    if not steps:
        return {}
    metrics = format_metrics([step.reply for step in steps])
    metrics["thinking/tokens_per_step"] = _mean([step.thinking_tokens for step in steps])
    metrics["thinking/names_action"] = _mention_rate([(step.reply.thought, step.reply.action) for step in steps])
    for kind in sorted({step.kind for step in steps if step.kind is not None}):
        of_kind = [step for step in steps if step.kind == kind]
        metrics |= level_shares([step.reply for step in of_kind], f"thinking/{kind}")
        metrics[f"thinking/{kind}/tokens_per_step"] = _mean([step.thinking_tokens for step in of_kind])
        metrics[f"thinking/{kind}/steps"] = float(len(of_kind))
    return metrics


def alternative_metrics(
    chosen: Sequence[ParsedStep], alternatives: Sequence[Sequence[Alternative]], scored: LevelScores, sampled: int
) -> Metrics:
    """`sampled` is the number of tokens sampled in the rollouts themselves."""
    pairs = [
        (step, alternative)
        for step, step_alternatives in zip(chosen, alternatives, strict=True)
        for alternative in step_alternatives
    ]
    generated_tokens = sum(alternative.generated_tokens for _, alternative in pairs)
    return {
        "thinking/steps_compared": float(len(chosen)),
        "thinking/groups": float(sum(group is not None for group in scored.groups)),
        "thinking/alternatives": float(len(pairs)),
        "thinking/failed_alternatives": float(sum(scored.failures.values())),
        **{f"thinking/failed/{why}": float(count) for why, count in sorted(scored.failures.items())},
        "thinking/alternatives_name_action": _mention_rate(
            [(alternative.thought, step.reply.action) for step, alternative in pairs if alternative.failure is None]
        ),
        "thinking/added_tokens": float(generated_tokens),
        "thinking/added_tokens_ratio": generated_tokens / max(1, sampled),
        "thinking/scored_tokens": float(scored.scored_tokens),
        "thinking/thought_gap": scored.thought_gap,
        "thinking/own_gap": scored.action_gap,
    }


def _mention_rate(pairs: Sequence[tuple[str | None, str | None]]) -> float:
    return _mean([float(mentions_action(thought, action)) for thought, action in pairs if thought is not None])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
