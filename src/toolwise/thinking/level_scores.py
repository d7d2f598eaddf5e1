"""Scores the same action tokens after the thoughts of all levels, in one batched pass, to measure what each level is
worth.

Each context is the history, a level with its thought, the action's opening tag and the action. The tag is part of the
context and not scored. The pass also yields the log-probs of the thoughts: if they match those at sampling time, the
thoughts were generated from nothing but the history and the level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.thinking.alternatives import LeakError
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.thinking_model import ScoringRequest, ThinkingModel, TokenScores
from toolwise.types import Alternative, LevelScore, ThinkingGroup

LEAK_NATS = 0.1
"""Half-precision kernels differ by 0.05 nats on average on the same tokens; a thought generated with the action in view
is off by more."""


@dataclass(frozen=True, slots=True)
class LevelScores:
    """One group per step, None if fewer than two levels are left, and statistics of the scoring pass."""

    groups: list[ThinkingGroup | None]
    failures: dict[str, int]
    """Reason why an alternative was dropped -> count."""
    thought_gap: float
    """Mean absolute difference between a thought token's log-prob when sampled and when scored."""
    action_gap: float
    """The same for the actions, in the context they were sampled in."""
    scored_tokens: int


@dataclass(frozen=True, slots=True)
class _Context:
    """One continuation of a step's history; it ends with the action's tokens."""

    ids: list[int]
    head: int
    alternative: Alternative | None


async def score_levels(
    model: ThinkingModel,
    codec: ChatTokenizer,
    steps: Sequence[ParsedStep],
    alternatives: Sequence[Sequence[Alternative]],
    *,
    temperature: float = 1.0,
    leak_nats: float = LEAK_NATS,
) -> LevelScores:
    """Score all contexts of all steps in one pass."""
    failures: Counter[str] = Counter()
    step_contexts: list[list[_Context]] = []
    for step, step_alternatives in zip(steps, alternatives, strict=True):
        contexts = [_context(step, alternative, codec) for alternative in step_alternatives]
        failures.update(context for context in contexts if isinstance(context, str))
        used = _Context(list(step.token_ids[: step.spans.action.stop]), len(step.spans.head), None)
        step_contexts.append([used, *(context for context in contexts if not isinstance(context, str))])
    scorable = [index for index, contexts in enumerate(step_contexts) if len(contexts) >= 2]
    requests = [ScoringRequest(steps[i].history, tuple(c.ids for c in step_contexts[i])) for i in scorable]
    scores = await model.score(requests, temperature) if requests else []
    thought_gaps: list[float] = []
    action_gaps: list[float] = []
    groups: list[ThinkingGroup | None] = [None] * len(steps)
    for i, token_scores in zip(scorable, scores, strict=True):
        groups[i] = _group(steps[i], step_contexts[i], token_scores, thought_gaps, action_gaps, failures)
    thought_gap, action_gap = (float(np.mean(gaps)) if gaps else 0.0 for gaps in (thought_gaps, action_gaps))
    # If the actions differ as well, it is a train–inference mismatch, which the learner checks (learner.mismatch).
    if thought_gap > leak_nats and thought_gap > 2 * action_gap:
        raise LeakError(
            f"the log-probs of alternative thoughts are {thought_gap:.3g} nats per token off what the history "
            f"alone gives (limit {leak_nats:g}): they were generated from something else, such as the action; "
            "prompt with exactly the history and the level"
        )
    token_count = sum(len(c.ids) for i in scorable for c in step_contexts[i])
    return LevelScores(groups, failures, thought_gap, action_gap, token_count)


def _context(step: ParsedStep, alternative: Alternative, codec: ChatTokenizer) -> _Context | str:
    """The other level's head followed by the step's action; or the reason why that is impossible."""
    if alternative.failure is not None:
        return alternative.failure
    tail = step.text[step.reply.spans.head[1] : step.reply.spans.action[1] if step.reply.spans.action else None]
    expected, action = alternative.text + tail, list(step.action_ids)
    ids = [*alternative.head_ids, *step.tail_ids]
    if codec.decode(ids)[: len(expected)] != expected:
        # A token spans the border in one of the two but not in the other: re-tokenise the text between them.
        head_text, action_text = codec.decode(alternative.head_ids), codec.decode(action)
        between = expected[len(head_text) : len(expected) - len(action_text)]
        ids = [*alternative.head_ids, *codec.encode(between), *action]
        if not expected.startswith(head_text) or codec.decode(ids) != expected:
            return "border"
    return _Context(ids, len(alternative.head_ids), alternative)


def _group(
    step: ParsedStep,
    contexts: Sequence[_Context],
    scores: Sequence[TokenScores],
    thought_gaps: list[float],
    action_gaps: list[float],
    failures: Counter[str],
) -> ThinkingGroup | None:
    """Appends the absolute differences between the log-probs at sampling and at scoring time to the two lists."""
    count, used = len(step.spans.action), step.reply.level
    assert used is not None  # steps without a level are not comparable
    level_scores = []
    for context, token_scores in zip(contexts, scores, strict=True):
        alternative, cut = context.alternative, len(context.ids) - count
        logprobs, entropies = token_scores.logprobs[cut:], token_scores.entropies[cut:]
        if not (np.isfinite(logprobs).all() and np.isfinite(entropies).all()):
            failures["not_a_number"] += 1
            if alternative is None:
                return None
            continue
        if alternative is None:
            level, tokens = used, step.thinking_tokens
            sampled = np.asarray(step.logprobs)[step.spans.action.start : step.spans.action.stop]
            action_gaps += np.abs(sampled - logprobs).tolist()
        else:
            level, tokens = alternative.level, alternative.thinking_tokens
            scored = token_scores.logprobs[alternative.forced_tokens : context.head]
            thought_gaps += np.abs(np.asarray(alternative.logprobs) - scored).tolist()
        between = context.ids[context.head : cut]
        level_scores.append(LevelScore(level, tokens, logprobs, entropies, alternative, between))
    if len(level_scores) < 2:
        return None
    return ThinkingGroup(used, tuple(sorted(level_scores, key=lambda score: score.level)), step.action_ids)
