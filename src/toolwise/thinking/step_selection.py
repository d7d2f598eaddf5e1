"""Which steps are thought over again: scored rollouts -> steps as they read -> those that a batch can afford."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Literal

from toolwise.thinking.alternatives import AlternativeWriter, Codec
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.reply import parse_reply
from toolwise.thinking.thinking_model import NoLogprobsError
from toolwise.thinking.token_spans import token_spans
from toolwise.types import Alternative, ScoredRollout, StepData

log = logging.getLogger("toolwise.thinking")
StepSelection = Literal["all", "mixed", "successful"]
MAX_WAVES = 8
"""Within a bound on tokens, alternatives are written in waves: what one leaves unspent, the next may use."""


def parse_steps(scored: Sequence[ScoredRollout], codec: Codec) -> list[ParsedStep]:
    """Every step of every rollout in which the policy sampled something."""
    steps = [step for s in scored for step in s.steps]
    if steps and all(step.policy_logprobs is None for step in steps):
        raise NoLogprobsError(
            "algorithm.rlvcr.enable: the policy gives text and no log-probs, so that its thoughts cannot be compared: "
            "use the local policy, or set enable = false"
        )
    return [
        parse_step(s.rollout.rollout_id, s.rollout.group_id, index, step, codec)
        for s in scored
        for index, step in enumerate(s.steps)
        if step.policy_logprobs is not None
    ]


def parse_step(rollout_id: str, group_id: str, index: int, step: StepData, codec: Codec) -> ParsedStep:
    given = step.policy_logprobs or {}
    missing = [key for key in ("prompt_ids", "token_ids", "logprobs") if given.get(key) is None]
    if missing:
        raise NoLogprobsError(
            f"rollout {rollout_id}, step {index}: the policy gives no {missing[0]}, so that its thoughts cannot be "
            "compared: use the local policy, or set algorithm.rlvcr.enable = false"
        )
    ids = list(given["token_ids"])
    if ids and ids[-1] == codec.end_id:
        ids.pop()
    text = codec.decode(ids)
    reading = parse_reply(text)
    kind = step.step_info.get("step_kind")
    return ParsedStep(
        rollout_id,
        group_id,
        index,
        given["prompt_ids"],
        ids,
        given["logprobs"],
        text,
        reading,
        token_spans(ids, codec.decode, reading),
        None if kind is None else str(kind),
    )


def choose_steps(
    steps: Sequence[ParsedStep],
    scored: Sequence[ScoredRollout],
    *,
    selection: StepSelection = "all",
    share: float = 1.0,
    success_score: float | None = None,
    seed: str = "0",
) -> list[ParsedStep]:
    """A share of the steps that may be compared, drawn at random, in an order of its own."""
    rollouts = _eligible_rollouts(scored, selection, success_score)
    able = [step for step in steps if step.comparable and step.rollout_id in rollouts]
    Random(seed).shuffle(able)
    return able[: math.ceil(share * len(able))]


def _eligible_rollouts(
    scored: Sequence[ScoredRollout], selection: StepSelection, success_score: float | None
) -> set[str]:
    """Ids of the rollouts whose steps may be chosen."""
    groups: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        groups[s.rollout.group_id].append(s)
    found: set[str] = set()
    for members in groups.values():
        if selection == "all":
            found |= {s.rollout.rollout_id for s in members}
            continue
        scores = [s.score for s in members if s.result.has_valid_score]
        mean = math.fsum(scores) / len(scores) if scores else 0.0
        mixed = len(set(scores)) > 1
        for s in members:
            if not s.result.has_valid_score:
                continue
            succeeded = s.score >= success_score if success_score is not None else mixed and s.score > mean
            if succeeded if selection == "successful" else mixed:
                found.add(s.rollout.rollout_id)
    return found


def _warn_if_nothing_fits(
    writer: AlternativeWriter, steps: Sequence[ParsedStep], done: Sequence[ParsedStep], max_tokens: int
) -> None:
    if steps and not done:
        log.warning(
            "no step was thought over: one may take %d tokens and max_added_tokens leaves %d; lower "
            "algorithm.rlvcr.max_thought_tokens, or raise max_added_tokens",
            writer.max_tokens_for(steps[0]),
            max_tokens,
        )


async def write_within_budget(
    writer: AlternativeWriter, steps: Sequence[ParsedStep], max_tokens: int | None, *, training_step: int = 0
) -> tuple[list[ParsedStep], list[tuple[Alternative, ...]]]:
    """The steps that fit, and their alternatives. `max_tokens` is kept whatever the model writes: a wave holds no more
    steps than could be paid for if every thought came out as long as it may."""
    if max_tokens is None:
        return list(steps), await writer.write(steps, training_step=training_step)
    done: list[ParsedStep] = []
    written: list[tuple[Alternative, ...]] = []
    left = max_tokens
    for _ in range(MAX_WAVES):
        wave, reserved = [], 0
        for step in steps[len(done) :]:
            reserved += writer.max_tokens_for(step)
            if reserved > left:
                break
            wave.append(step)
        if not wave:
            _warn_if_nothing_fits(writer, steps, done, max_tokens)
            break
        found = await writer.write(wave, training_step=training_step)
        left -= sum(other.generated_tokens for others in found for other in others)
        done += wave
        written += found
    return done, written
