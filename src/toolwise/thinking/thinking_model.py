"""The model interface of the thinking stage: generate a continuation, and score given continuations.

Implemented by the engine (`EngineModel`), or by a policy that generates plus a function that scores
(`PolicyWithScorer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from toolwise.errors import PolicyError
from toolwise.protocols import Generation, Metrics, PrefixEngine, Sampling, TokenGenerator

if TYPE_CHECKING:
    from toolwise.types import Floats


class NoLogprobsError(PolicyError):
    """The policy returns text without log-probs, so the value of its thoughts cannot be measured."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Continuations of one prefix, scored together so that shared tokens are computed once."""

    prefix_ids: Sequence[int]
    continuations: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One entry per token of a continuation."""

    logprobs: Floats
    entropies: Floats
    """Entropy of the distribution at each token."""


class ThinkingModel(Protocol):
    """Generates and scores tokens. Log-probs are after temperature in both."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation: ...

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]: ...

    def counters(self) -> Metrics:
        """Cumulative counts of prefilled and reused tokens; empty if not counted."""


ScoreFn = Callable[[Sequence[ScoringRequest], float], list[tuple[TokenScores, ...]]]


@dataclass(frozen=True, slots=True)
class PolicyWithScorer:
    """A policy that generates, and a function that scores all contexts in one pass with the same weights."""

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
    """An engine with a prefix cache."""

    engine: PrefixEngine
    stop_strings: tuple[str, ...] = ()
    """Strings that end a thought, for engines that stop on text."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        return await self.engine.generate(token_ids, sampling, stop_strings=self.stop_strings)

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
        results = await asyncio.gather(
            *(self.engine.score(c.prefix_ids, list(c.continuations), temperature=temperature) for c in contexts)
        )
        return [
            tuple(TokenScores(np.asarray(s.logprobs, np.float32), np.asarray(s.entropies, np.float32)) for s in scores)
            for scores in results
        ]

    def counters(self) -> Metrics:
        metrics = self.engine.metrics()
        names = {"prefilled_tokens": "engine/prefilled_tokens", "reused_tokens": "engine/reused_tokens"}
        return {name: float(metrics[key]) for name, key in names.items() if key in metrics}
