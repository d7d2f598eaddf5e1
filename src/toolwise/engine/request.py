"""One request to the engine: tokens to continue, to score or to encode, and the results so far."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolwise.engine.blocks import Lease
from toolwise.errors import PolicyError
from toolwise.protocols import Generation, Sampling

LogitsMask = Callable[[Sequence[int]], Any]
"""Maps the tokens sampled so far to a bool tensor over the vocabulary, true for allowed ones; None allows all."""
OnTokens = Callable[[Sequence[int]], None]
"""Receives newly sampled tokens, in the event loop of the request."""
Kind = Literal["generate", "score", "read"]
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SampledPiece:
    """New tokens of a request, with their log-probs and, if they were asked for, the likeliest tokens at each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()

    def __add__(self, more: SampledPiece) -> SampledPiece:
        """Both pieces as one."""
        return SampledPiece(
            [*self.token_ids, *more.token_ids],
            [*self.logprobs, *more.logprobs],
            [*self.top_logprobs, *more.top_logprobs],
        )


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """How to sample replies that are served. Training never passes them: a learner cannot reproduce the log-probs of
    tokens from a truncated distribution."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all. Applied before `top_p`."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report at each position."""
    on_sampled: Callable[[SampledPiece], None] | None = None
    """Like `on_tokens`, with log-probs."""
    stop_strings: tuple[str, ...] = ()
    """Of the turns of an agent: each ends with the first of them that it writes."""

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise PolicyError(
                f"top_p must be above 0 and at most 1, top_k at least 0 and top_logprobs 0 to {MAX_TOP_LOGPROBS}"
            )

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


NO_OPTIONS = ServingOptions()


@dataclass(frozen=True, slots=True)
class ContinuationScores:
    """Scores of given tokens, one number per token, after temperature."""

    logprobs: Sequence[float]
    entropies: Sequence[float]


@dataclass(eq=False, slots=True)
class Request:
    """`tokens[:lease.held]` are computed. Once all are, the request gets its result: its next token, or its final
    scores or hidden state."""

    kind: Kind
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    targets: Sequence[int] = ()
    """score: the tokens from position `prompt_length` on; the last one need not be computed and is not in `tokens`."""
    stop_strings: tuple[str, ...] = ()
    logits_mask: LogitsMask | None = None
    on_tokens: OnTokens | None = None
    options: ServingOptions = NO_OPTIONS
    reported: int = 0
    """Number of sampled tokens that the event loop has been told of."""
    received: int = 0
    """Number of sampled tokens that `on_tokens` has received."""
    mean: bool = False
    """read: the mean of all hidden states instead of the last one; computes every token, cached or not."""

    number: int = -1
    """Order of arrival: decides who goes first and who is preempted."""
    lease: Lease = field(default_factory=Lease)
    """Empty unless it runs."""
    cache_version: int | None = None
    """The version of the weights that computed its first keys and values, if those were kept when new weights came: as
    old as that counts each later token."""
    has_followers: bool = False
    """Other requests wait for this prompt: its end must be kept for them."""
    cancelled: bool = False
    stopped: bool = False
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    entropies: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    hidden: Any = None
    """Hidden state of the last computed token; the sum of all for a mean."""
    fault: Exception | None = None

    @property
    def held(self) -> int:
        return self.lease.held

    @property
    def pending(self) -> int:
        """Tokens yet to compute."""
        return len(self.tokens) - self.held

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def decodes(self) -> bool:
        """Whether only its last token is yet to be computed."""
        return self.kind == "generate" and self.pending == 1

    @property
    def decodes_freely(self) -> bool:
        """Whether its next tokens depend on nothing but the model, so that a device can decode many at once."""
        if self.stop_strings or self.logits_mask is not None or self.options.top_logprobs:
            return False
        return self.decodes

    @property
    def streams(self) -> bool:
        """Whether someone reads its tokens while they are sampled."""
        return self.on_tokens is not None or self.options.on_sampled is not None

    @property
    def first_output_position(self) -> int:
        """The first position whose hidden state is needed."""
        if self.kind == "score":
            return self.prompt_length - 1 + len(self.logprobs)
        return 0 if self.mean else len(self.tokens) - 1

    @property
    def reusable_tokens(self) -> int:
        """Number of tokens that can come from the prefix cache."""
        if self.kind == "score":
            return self.prompt_length
        return 0 if self.mean else len(self.tokens)

    def reset_computed(self) -> None:
        """Its blocks were freed: sampled tokens stay, everything else is recomputed."""
        self.lease = Lease()
        self.hidden = self.cache_version = None
        if self.kind == "score":
            self.logprobs, self.entropies = array("f"), array("f")

    def version_of_next(self, version: int) -> int:
        """What its next token counts as, sampled by the weights of `version`."""
        return version if self.cache_version is None else self.cache_version

    def result(self) -> Any:
        if self.kind == "score":
            return ContinuationScores(self.logprobs, self.entropies)
        if self.kind == "read":
            hidden = self.hidden.float() / (len(self.tokens) if self.mean else 1)
            return hidden.cpu()
        return Generation(
            array("i", self.tokens[self.prompt_length :]),
            self.logprobs,
            "stop" if self.stopped else "length",
            min(self.versions, default=0),
            self.versions if len(set(self.versions)) > 1 else None,
            self.top_logprobs if self.options.top_logprobs else None,
        )
