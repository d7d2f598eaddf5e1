"""Scores stored rollouts with the same calls as in training; stops early if too many calls time out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolwise.checks.reward.stored_rollouts import StoredRollout
from toolwise.rewards.signature import Mode
from toolwise.training.scoring import Scoring
from toolwise.types import EvaluateResult

MAX_TIMEOUTS, MAX_TIMEOUT_SHARE = 3, 0.1
"""A pass stops once this number and this share of calls have timed out: each hanging call costs a full deadline."""
_MAX_CHUNK_CALLS = 256
"""Maximum number of calls between two checks for timeouts."""

Results = list[EvaluateResult | None]
"""One per rollout, in order; None if the pass stopped before it."""


def scoring_mode(scoring: Scoring) -> Mode:
    """What one call scores: a rollout, a group or a batch; with several rewards, the largest any of them needs."""
    modes: set[str] = {part.reward.mode for part in scoring.rewards.parts}
    if scoring.rewards.combine_mode == "normalize":  # normalizes within groups, so a call needs whole groups
        modes.add("group")
    return "batch" if "batch" in modes else "group" if "group" in modes else "pointwise"


def split_into_calls(stored: Sequence[StoredRollout], mode: Mode) -> list[list[int]]:
    """Indices of the rollouts in each call, in order of first appearance."""
    calls: dict[object, list[int]] = {}
    for index, rollout in enumerate(stored):
        key: object = index if mode == "pointwise" else rollout.group if mode == "group" else rollout.batch
        calls.setdefault(key, []).append(index)
    return list(calls.values())


async def score_rollouts(scoring: Scoring, stored: Sequence[StoredRollout], *, first_chunk: int = 1) -> Results:
    """Score all rollouts, in growing chunks of calls so that a hanging function is noticed early."""
    results: Results = [None] * len(stored)
    tried = timeouts = 0
    for calls in _chunk_calls(stored, split_into_calls(stored, scoring_mode(scoring)), first_chunk):
        if timeouts >= max(MAX_TIMEOUTS, MAX_TIMEOUT_SHARE * tried):
            break
        indices = [index for call in calls for index in call]
        step = stored[indices[0]].step
        scored = await scoring.evaluate([stored[index].rollout for index in indices], step=step)
        for index, result in zip(indices, scored, strict=True):
            results[index] = result
        tried += len(calls)
        errors = [scored_first.error for call in calls if (scored_first := results[call[0]]) is not None]
        timeouts += sum(error is not None and error.kind == "timeout" for error in errors)
    return results


def _chunk_calls(
    stored: Sequence[StoredRollout], calls: Sequence[list[int]], first_chunk: int
) -> Iterator[list[list[int]]]:
    """Chunks that double in size; all calls of a chunk share a step, since the step is passed to the reward."""
    size, chunk = first_chunk, list[list[int]]()
    for call in calls:
        if chunk and (len(chunk) >= size or stored[call[0]].batch != stored[chunk[0][0]].batch):
            yield chunk
            size, chunk = min(2 * size, _MAX_CHUNK_CALLS), []
        chunk.append(call)
    if chunk:
        yield chunk
