"""Rollouts whose steps were thought over, and RLVCR done again, slowly and by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from toolwise.messages import Message
from toolwise.types import (
    Alternative,
    AnnotatedRollout,
    EvaluateResult,
    LevelScore,
    Rollout,
    RolloutThinking,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    ThinkingGroup,
    ThinkingStep,
    Usage,
)

LEVEL, HEAD, ACTION = 2, 3, 2
"""Tokens of the level, of level and thought, and of the action, in every step made here."""


def level_score(
    level: int, logprob: float, *, used: bool, tokens: int = 0, entropy: float = 1.0, drawn: Sequence[float] = ()
) -> LevelScore:
    head = [100 + level, *([200 + level] * tokens)]
    other = None if used else Alternative(level, [1, 2, 100 + level], 1, head, [-0.5] * tokens, generated_tokens=tokens)
    # Unequal tokens with the mean that was asked for.
    logprobs = np.array(drawn or [logprob + 0.25, logprob - 0.25], np.float32)
    return LevelScore(level, tokens, logprobs, np.full(ACTION, entropy, np.float32), other, [9])


def thinking_step(
    used: int | None,
    logprobs: Mapping[int, float] | None = None,
    *,
    tokens: Mapping[int, int] | None = None,
    entropies: Mapping[int, float] | None = None,
) -> ThinkingStep:
    spent = (tokens or {}).get(used or 0, 0)
    if used is None or logprobs is None:
        return ThinkingStep(used, spent, HEAD)
    scores = tuple(
        level_score(
            level,
            value,
            used=level == used,
            tokens=(tokens or {}).get(level, 0),
            entropy=(entropies or {}).get(level, 1),
        )
        for level, value in sorted(logprobs.items())
    )
    return ThinkingStep(used, spent, HEAD, ThinkingGroup(used, scores, [7, 8]))


def thoughtful(
    score: float,
    steps: Sequence[ThinkingStep],
    *,
    name: str = "r",
    group: str = "g",
    price: float = 0.0,
    anneal: float = 1.0,
    charged: bool = False,
) -> AnnotatedRollout:
    count = HEAD + 1 + ACTION
    made = tuple(
        StepData(
            system_step_index=index,
            observation_data=[Message(role="user", content="?")],
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={"token_ids": [7] * count, "logprobs": [-1.0] * count, "prompt_ids": [1, 2]},
        )
        for index in range(len(steps))
    )
    task = Task(task_id=group, prompt=[Message(role="user", content="?")])
    rollout = Rollout(name, group, 0, 0, task, None, made, task.prompt, StopReason.ANSWERED, Usage())
    scored = ScoredRollout(rollout, EvaluateResult(score=score), made)
    return AnnotatedRollout(scored, thinking=RolloutThinking(tuple(steps), price, anneal, charged))


def random_batch(
    seed: int, *, price: float = 0.0, anneal: float = 1.0, level_tokens: int | None = None
) -> list[AnnotatedRollout]:
    """Groups of several sizes, some of equals; steps with all levels, with some, with none; levels not named."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(3):
        for number in range(int(rng.integers(2, 5))):
            steps = []
            for _ in range(int(rng.integers(1, 4))):
                used = int(rng.integers(1, 5))
                there = {used, *(k for k in (1, 2, 3, 4) if rng.random() < 0.8)}
                logprobs = {k: float(-rng.exponential()) for k in there}
                tokens = {k: 0 if k == 1 else int(rng.integers(1, 9)) for k in (1, 2, 3, 4)}
                entropies = {k: float(rng.exponential()) for k in there}
                steps.append(
                    thinking_step(None)
                    if rng.random() < 0.1
                    else thinking_step(used, logprobs if len(there) > 1 else None, tokens=tokens, entropies=entropies)
                )
            steps = [replace(step, level_tokens=level_tokens) for step in steps]
            score = float(group == 2 or rng.integers(0, 2))
            found.append(
                thoughtful(score, steps, name=f"g{group}r{number}", group=f"g{group}", price=price, anneal=anneal)
            )
    return found


# The same again, with loops and the standard library alone.


def slow_trajectory(rollouts: Sequence[AnnotatedRollout]) -> list[float]:
    found = []
    for rollout in rollouts:
        peers = [r.scored.score for r in rollouts if r.scored.rollout.group_id == rollout.scored.rollout.group_id]
        spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
        found.append((rollout.scored.score - statistics.fmean(peers)) / (spread + 1e-6) if spread else 0.0)
    return found


def slow_utilities(
    rollouts: Sequence[AnnotatedRollout], number: int, index: int, *, score: str, diversity_w: float
) -> dict[int, float]:
    rollout = rollouts[number]
    thinking = rollout.thinking
    assert thinking is not None
    group = thinking.steps[index].group
    assert group is not None
    peers = [r for r in rollouts if r.scored.rollout.group_id == rollout.scored.rollout.group_id]
    used = [s.level for r in peers if r.thinking for s in r.thinking.steps if s.level is not None]
    found = {}
    for entry in group.scores:
        logprob = sum(float(x) for x in entry.action_logprobs) / len(entry.action_logprobs)
        entropy = sum(float(x) for x in entry.action_entropies) / len(entry.action_entropies)
        value = {"logprob": logprob, "confidence": math.exp(logprob), "neg_entropy": -entropy}[score]
        value -= thinking.price * entry.thinking_tokens
        value += diversity_w * thinking.anneal * (1 - used.count(entry.level) / len(used))
        found[entry.level] = value
    return found


def slow_advantage(utilities: Mapping[int, float], used: int, mode: str) -> float:
    values = list(utilities.values())
    if len(values) < 2 or len(set(values)) == 1:
        return 0.0
    centred = utilities[used] - statistics.fmean(values)
    return centred / (statistics.stdev(values) + 1e-6) if mode == "mean_std_norm" else centred


def slow_weights(utilities: Mapping[int, float], floor: float = 0.05) -> dict[int, float] | None:
    if len(utilities) < 4:
        return None
    c = {k: math.exp(u) for k, u in utilities.items()}
    low, high = min(c.values()), max(c.values())
    flat = max(utilities.values()) - min(utilities.values()) < floor
    n = {k: 0.5 if flat else (value - low) / (high - low) for k, value in c.items()}
    mean = sum(math.exp(2 * x) for x in n.values()) / 4
    return {k: math.exp(2 * x) / mean for k, x in n.items()}


def slow_tokens(rollouts: Sequence[AnnotatedRollout], **settings: Any) -> list[list[list[float]]]:
    """Additive and gated: one number a token."""
    w, gate = settings.get("step_advantage_w", 1.0), settings.get("gate", "none")
    base = slow_trajectory(rollouts)
    found = []
    for number, rollout in enumerate(rollouts):
        assert rollout.thinking is not None
        of_rollout = []
        for index, step in enumerate(rollout.thinking.steps):
            tokens = [base[number]] * (HEAD + 1 + ACTION)
            if step.group is not None:
                utilities = slow_utilities(
                    rollouts,
                    number,
                    index,
                    score=settings.get("score", "logprob"),
                    diversity_w=settings.get("thinking_diversity_w", 0.5),
                )
                extra = w * slow_advantage(utilities, step.group.level, settings.get("mode", "mean_norm"))
                for place in range(len(tokens)):
                    if gate == "none":
                        tokens[place] += extra
                    elif gate == "signed" and base[number] != 0:
                        if place < HEAD:
                            tokens[place] += extra if base[number] > 0 else -extra
                    elif place < (HEAD if step.level_tokens is None else step.level_tokens):
                        least = settings.get("success_score")
                        if base[number] > 0 if least is None else rollout.scored.score >= least:
                            tokens[place] += extra
            of_rollout.append(tokens)
        found.append(of_rollout)
    return found
