"""Parses the steps of scored rollouts and chooses which get alternatives within the token budget."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Literal

from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.thinking.alternatives import AlternativeWriter, without_end
from toolwise.thinking.parsed_step import ParsedStep, token_spans
from toolwise.thinking.reply import parse_reply
from toolwise.thinking.thinking_model import NoLogprobsError
from toolwise.types import Alternative, Rollout, ScoredRollout, StepData

log = logging.getLogger("toolwise.thinking")
StepSelection = Literal["all", "mixed", "successful"]
MAX_WAVES = 8
"""Under a token budget, alternatives are generated in waves: the next wave uses what the last one left unspent."""


def parse_steps(scored: Sequence[ScoredRollout], codec: ChatTokenizer) -> list[ParsedStep]:
    """Every step of every rollout in which the policy sampled something."""
    steps = [step for s in scored for step in s.steps]
    if steps and all(step.policy_logprobs is None for step in steps):
        raise NoLogprobsError(
            "algorithm.rlvcr.enable: the policy returns text without log-probs, so its thoughts cannot be compared: "
            "use the local policy, or set enable = false"
        )
    return [
        parse_step(s.rollout.rollout_id, s.rollout.group_id, index, step, codec)
        for s in scored
        for index, step in enumerate(s.steps)
        if step.policy_logprobs is not None
    ]


def parse_step(rollout_id: str, group_id: str, index: int, step: StepData, codec: ChatTokenizer) -> ParsedStep:
    tokens = step.tokens
    if not tokens.has_ids:
        raise NoLogprobsError(
            f"rollout {rollout_id}, step {index}: the policy returned no token ids, so its thoughts cannot be "
            "compared: use the local policy, or set algorithm.rlvcr.enable = false"
        )
    ids = without_end(tokens.token_ids, codec)
    text = codec.decode(ids)
    reply, kind = parse_reply(text), step.step_info.get("step_kind")
    return ParsedStep(
        rollout_id,
        group_id,
        index,
        tokens.prompt_ids,
        ids,
        tokens.logprobs,
        text,
        reply,
        token_spans(ids, codec.decode, reply),
        None if kind is None else str(kind),
    )


def count_thinking_tokens(rollout: Rollout, *, codec: ChatTokenizer) -> int:
    """The tokens inside the thoughts of a rollout; none where a policy gives no token ids."""
    steps = [(index, step) for index, step in enumerate(rollout.steps) if step.tokens.has_ids]
    return sum(
        parse_step(rollout.rollout_id, rollout.group_id, index, step, codec).thinking_tokens for index, step in steps
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
    """A random share of the steps that may be compared, in random order."""
    rollout_ids = _eligible_rollouts(scored, selection, success_score)
    eligible = [step for step in steps if step.comparable and step.rollout_id in rollout_ids]
    Random(seed).shuffle(eligible)
    return eligible[: math.ceil(share * len(eligible))]


def _eligible_rollouts(
    scored: Sequence[ScoredRollout], selection: StepSelection, success_score: float | None
) -> set[str]:
    if selection == "all":
        return {s.rollout.rollout_id for s in scored}
    groups: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        if s.result.has_valid_score:
            groups[s.rollout.group_id].append(s)
    eligible: set[str] = set()
    for members in groups.values():
        mixed, mean = len({s.score for s in members}) > 1, math.fsum(s.score for s in members) / len(members)
        for s in members:
            succeeded = s.score >= success_score if success_score is not None else mixed and s.score > mean
            if succeeded if selection == "successful" else mixed:
                eligible.add(s.rollout.rollout_id)
    return eligible


async def write_within_budget(
    writer: AlternativeWriter, steps: Sequence[ParsedStep], max_tokens: int | None, *, training_step: int = 0
) -> tuple[list[ParsedStep], list[tuple[Alternative, ...]]]:
    """Return the steps that fit and their alternatives. Never exceeds `max_tokens`: a wave has only as many steps as
    fit if every thought is as long as allowed."""
    if max_tokens is None:
        return list(steps), await writer.write(steps, training_step=training_step)
    done: list[ParsedStep] = []
    written: list[tuple[Alternative, ...]] = []
    budget = max_tokens
    for _ in range(MAX_WAVES):
        wave, reserved = [], 0
        for step in steps[len(done) :]:
            reserved += writer.max_tokens_for(step)
            if reserved > budget:
                break
            wave.append(step)
        if not wave:
            break
        alternatives = await writer.write(wave, training_step=training_step)
        budget -= sum(alternative.generated_tokens for of_step in alternatives for alternative in of_step)
        done += wave
        written += alternatives
    if steps and not done:
        log.warning(
            "no step got alternative thoughts: one step may take %d tokens but max_added_tokens allows %d; lower "
            "algorithm.rlvcr.max_thought_tokens or raise max_added_tokens",
            writer.max_tokens_for(steps[0]),
            max_tokens,
        )
    return done, written
