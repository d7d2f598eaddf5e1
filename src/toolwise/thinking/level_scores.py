"""What each level was worth: the same action tokens scored after the thoughts of all levels, in one batched pass.

Each context is the history, a level with its thought, the action's opening tag and the action. The tag stands in the
context and is not scored. Thoughts are computed on the way, and that they are as likely as when they were drawn shows
that their writer saw nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.thinking.alternatives import Codec, LeakError
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.thinking_model import ScoringRequest, ThinkingModel, TokenScores
from toolwise.types import Alternative, LevelScore, ThinkingGroup

LEAK_NATS = 0.1
"""Half-precision kernels put log-probs of the same tokens 0.05 nats apart on average; a thought that was written in
sight of its action is off by more."""


@dataclass(frozen=True, slots=True)
class LevelScores:
    """Groups, one a step, None where fewer than two levels are left; and what the pass showed beside them."""

    groups: list[ThinkingGroup | None]
    failures: dict[str, int]
    """Why alternatives left their group -> how many did."""
    thought_gap: float
    """Mean distance between a thought token's log-prob as drawn and as scored."""
    action_gap: float
    """The same of the actions, in the context they were drawn in."""
    scored_tokens: int


@dataclass(frozen=True, slots=True)
class _Context:
    """One continuation of a step's history; its last tokens are the action's."""

    ids: list[int]
    head: int
    alternative: Alternative | None


async def score_levels(
    model: ThinkingModel,
    codec: Codec,
    steps: Sequence[ParsedStep],
    alternatives: Sequence[Sequence[Alternative]],
    *,
    temperature: float = 1.0,
    leak_nats: float = LEAK_NATS,
) -> LevelScores:
    """One pass over all contexts of all steps."""
    failures: dict[str, int] = {}
    laid_out: list[list[_Context]] = []
    for step, others in zip(steps, alternatives, strict=True):
        contexts = [_Context(list(step.token_ids[: step.spans.action.stop]), len(step.spans.head), None)]
        for other in others:
            made = _context(step, other, codec)
            if isinstance(made, str):
                failures[made] = failures.get(made, 0) + 1
            else:
                contexts.append(made)
        laid_out.append(contexts)
    asked = [number for number, contexts in enumerate(laid_out) if len(contexts) >= 2]
    requests = [ScoringRequest(steps[i].history, tuple(c.ids for c in laid_out[i])) for i in asked]
    found = dict(zip(asked, await model.score(requests, temperature) if requests else [], strict=True))
    gaps = _LogprobGaps()
    groups = [
        _group(step, contexts, found[i], gaps, failures) if i in found else None
        for i, (step, contexts) in enumerate(zip(steps, laid_out, strict=True))
    ]
    gaps.check(leak_nats)
    counted = sum(len(c.ids) for i in asked for c in laid_out[i])
    return LevelScores(groups, failures, gaps.thoughts, gaps.actions, counted)


def _context(step: ParsedStep, other: Alternative, codec: Codec) -> _Context | str:
    """The other level's head before the step's own action; or why there can be none."""
    if other.failure is not None:
        return other.failure
    rest = step.text[step.reading.spans.head[1] : step.reading.spans.action[1] if step.reading.spans.action else None]
    wanted, action = other.text + rest, list(step.action_ids)
    ids = [*other.head_ids, *step.tail_ids]
    if codec.decode(ids)[: len(wanted)] != wanted:
        # A token lies across the border in one of the two and not in the other: the border is written anew.
        left, right = codec.decode(other.head_ids), codec.decode(action)
        ids = [*other.head_ids, *codec.encode(wanted[len(left) : len(wanted) - len(right)]), *action]
        if not wanted.startswith(left) or codec.decode(ids) != wanted:
            return "border"
    return _Context(ids, len(other.head_ids), other)


def _group(
    step: ParsedStep,
    contexts: Sequence[_Context],
    scores: Sequence[TokenScores],
    gaps: _LogprobGaps,
    failures: dict[str, int],
) -> ThinkingGroup | None:
    count = len(step.spans.action)
    found = []
    for context, of_context in zip(contexts, scores, strict=True):
        other, cut = context.alternative, len(context.ids) - count
        logprobs, entropies = of_context.logprobs[cut:], of_context.entropies[cut:]
        if not (np.isfinite(logprobs).all() and np.isfinite(entropies).all()):
            failures["not_a_number"] = failures.get("not_a_number", 0) + 1
            if other is None:
                return None
            continue
        if other is None:
            gaps.add_action(np.asarray(step.logprobs)[step.spans.action.start : step.spans.action.stop] - logprobs)
        else:
            gaps.add_thought(np.asarray(other.logprobs) - of_context.logprobs[other.forced_tokens : context.head])
        level = other.level if other else step.reading.level
        assert level is not None  # a step without one is not comparable
        tokens = other.thinking_tokens if other else step.thinking_tokens
        between = context.ids[context.head : cut]
        found.append(LevelScore(level, tokens, logprobs, entropies, other, between))
    used = step.reading.level
    if used is None or len(found) < 2:
        return None
    return ThinkingGroup(used, tuple(sorted(found, key=lambda score: score.level)), step.action_ids)


class _LogprobGaps:
    """How far what was drawn stands from what was scored."""

    def __init__(self) -> None:
        self._actions: list[float] = []
        self._thoughts: list[float] = []

    def add_action(self, gaps: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> None:
        self._actions += np.abs(gaps).tolist()

    def add_thought(self, gaps: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> None:
        self._thoughts += np.abs(gaps).tolist()

    @property
    def actions(self) -> float:
        return float(np.mean(self._actions)) if self._actions else 0.0

    @property
    def thoughts(self) -> float:
        return float(np.mean(self._thoughts)) if self._thoughts else 0.0

    def check(self, leak_nats: float) -> None:
        # Where the actions are off as well, policy and scorer disagree about everything: the canary's business.
        if self.thoughts > leak_nats and self.thoughts > 2 * self.actions:
            raise LeakError(
                f"thoughts of other levels are {self.thoughts:.3g} nats a token off what the history alone gives "
                f"(more than {leak_nats:g}): their writer saw something else, such as the action; give it exactly the "
                "history and the level"
            )
