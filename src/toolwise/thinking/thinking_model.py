"""The seam to a model that can think otherwise: it continues tokens, and says how likely given ones were.

Anything that generates and scores will do: the engine (`EngineModel`), or a policy that generates beside a function
that scores (`PolicyWithScorer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from toolwise.errors import PolicyError
from toolwise.protocols import Generation, Metrics, Sampling, TokenGenerator

if TYPE_CHECKING:
    from toolwise.types import Floats


class NoLogprobsError(PolicyError):
    """A policy that gives text alone: nothing can be said of what its thoughts were worth."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Continuations of one prefix, to be scored together: what they share is computed once."""

    prefix_ids: Sequence[int]
    continuations: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One entry a token of a continuation."""

    logprobs: Floats
    entropies: Floats
    """Of what the token was drawn from."""


class ThinkingModel(Protocol):
    """Log-probs are after temperature on both sides."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation: ...

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]: ...

    def counters(self) -> Metrics:
        """Tokens since the beginning: prefilled, and reused in place of it; empty where nobody counts."""
        ...


ScoreFn = Callable[[Sequence[ScoringRequest], float], list[tuple[TokenScores, ...]]]


@dataclass(frozen=True, slots=True)
class PolicyWithScorer:
    """A policy that generates, and a function that scores all contexts in one pass over the same weights."""

    policy: TokenGenerator
    score_fn: ScoreFn

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        return await self.policy.generate(token_ids, sampling)

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
        return await asyncio.to_thread(self.score_fn, contexts, temperature)

    def counters(self) -> Metrics:
        return {}


@dataclass(frozen=True, slots=True)
class EngineModel:
    """An engine that computes what prompts share once: `generate(token_ids, sampling)`, `score(prefix_ids,
    continuations, temperature=…)`, and `metrics()` with its counters."""

    engine: Any
    stop_strings: tuple[str, ...] = ()
    """Where a thought ends, for engines that read text."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        more = {"stop_strings": self.stop_strings} if self.stop_strings else {}
        found: Generation = await self.engine.generate(token_ids, sampling, **more)
        return found

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
        found = await asyncio.gather(
            *(self.engine.score(c.prefix_ids, list(c.continuations), temperature=temperature) for c in contexts)
        )
        return [tuple(_to_token_scores(scores) for scores in of_prefix) for of_prefix in found]

    def counters(self) -> Metrics:
        found = self.engine.metrics()
        names = {"prefilled_tokens": "engine/prefilled_tokens", "reused_tokens": "engine/reused_tokens"}
        return {name: float(found[key]) for name, key in names.items() if key in found}


def _to_token_scores(scores: Any) -> TokenScores:
    return TokenScores(np.asarray(scores.logprobs, np.float32), np.asarray(scores.entropies, np.float32))


def require_token_generator(policy: object) -> TokenGenerator:
    """The policy, where it works with tokens and their log-probs."""
    if not isinstance(policy, TokenGenerator):
        raise NoLogprobsError(
            f"algorithm.rlvcr.enable: {type(policy).__name__} gives text and no log-probs, so that thoughts cannot be "
            "compared: use the local policy, or set enable = false"
        )
    return policy
