"""One pass of a reward over stored rollouts, in calls of the same make as in training, with an end to its patience."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolwise.checks.reward.stored_rollouts import StoredRollout
from toolwise.rewards.signature import Mode
from toolwise.training.scoring import Scoring
from toolwise.types import EvaluateResult

MAX_TIMEOUTS, MAX_TIMEOUT_SHARE = 3, 0.1
"""A pass ends early once so many calls, and such a share of them, ran out of time: a hang costs one deadline each."""
_MAX_CHUNK_CALLS = 256
"""Calls under way between two looks at how it goes."""

Results = list[EvaluateResult | None]
"""One a rollout, in order; None where it was not tried any more."""


def scoring_mode(scoring: Scoring) -> Mode:
    """What a call is given: one rollout, a group or a batch; of several rewards, the one that needs most."""
    modes: set[str] = {part.reward.mode for part in scoring.rewards.parts}
    if scoring.rewards.combine_mode == "normalize":  # within groups, which must come whole
        modes.add("group")
    return "batch" if "batch" in modes else "group" if "group" in modes else "pointwise"


def split_into_calls(stored: Sequence[StoredRollout], mode: Mode) -> list[list[int]]:
    """The places of the rollouts that share a call, in the order in which they come."""
    calls: dict[object, list[int]] = {}
    for place, one in enumerate(stored):
        key: object = place if mode == "pointwise" else one.group if mode == "group" else one.batch
        calls.setdefault(key, []).append(place)
    return list(calls.values())


async def score_rollouts(scoring: Scoring, stored: Sequence[StoredRollout], *, first_chunk: int = 1) -> Results:
    """One pass. A few calls at first, then ever more of them, so that a function that hangs is found out early."""
    results: Results = [None] * len(stored)
    tried = timeouts = 0
    for calls in _chunk_calls(stored, split_into_calls(stored, scoring_mode(scoring)), first_chunk):
        if timeouts >= max(MAX_TIMEOUTS, MAX_TIMEOUT_SHARE * tried):
            break
        places = [place for call in calls for place in call]
        step = stored[places[0]].step
        scored = await scoring.evaluate([stored[place].rollout for place in places], step=step)
        for place, result in zip(places, scored, strict=True):
            results[place] = result
        tried += len(calls)
        timeouts += sum(1 for call in calls if _timed_out(results[call[0]]))
    return results


def _chunk_calls(
    stored: Sequence[StoredRollout], calls: Sequence[list[int]], first_chunk: int
) -> Iterator[list[list[int]]]:
    """Twice as many calls each time, all of one step: the step is an argument of theirs."""
    size, portion = first_chunk, list[list[int]]()
    for call in calls:
        if portion and (len(portion) >= size or stored[call[0]].batch != stored[portion[0][0]].batch):
            yield portion
            size, portion = min(2 * size, _MAX_CHUNK_CALLS), []
        portion.append(call)
    if portion:
        yield portion


def _timed_out(result: EvaluateResult | None) -> bool:
    return result is not None and result.error is not None and result.error.kind == "timeout"
