"""One piece of work for the engine: tokens to continue, to score or to read, and what has come of it so far."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolwise.engine.blocks import Lease
from toolwise.protocols import Generation, Sampling

LogitsMask = Callable[[Sequence[int]], Any]
"""From the tokens sampled so far to a bool tensor over the vocabulary, true where the next may be; None: anywhere."""
Kind = Literal["generate", "score", "read"]


@dataclass(frozen=True, slots=True)
class ContinuationScores:
    """What the model says of tokens that somebody else chose: one figure a token, after temperature."""

    logprobs: Sequence[float]
    entropies: Sequence[float]


@dataclass(eq=False, slots=True)
class Request:
    """`tokens[:lease.held]` are computed; when all are, the request gets what it came for: a token more, or its end."""

    kind: Kind
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    targets: Sequence[int] = ()
    """score: the tokens after `prompt_length - 1`; the last of them need not be computed and is not in `tokens`."""
    stop_strings: tuple[str, ...] = ()
    logits_mask: LogitsMask | None = None
    mean: bool = False
    """read: the mean of all hidden states in place of the last one; reads every token, cached or not."""

    number: int = -1
    """The order of arrival, which decides who goes first and who gives way."""
    lease: Lease | None = None
    has_followers: bool = False
    """Others wait for this prompt: its end is to be kept for them."""
    cancelled: bool = False
    stopped: bool = False
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    entropies: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    hidden: Any = None
    """Of the last computed token; for a mean the sum."""
    fault: Exception | None = None

    @property
    def held(self) -> int:
        return self.lease.held if self.lease is not None else 0

    @property
    def pending(self) -> int:
        """Tokens yet to compute."""
        return len(self.tokens) - self.held

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def first_output_position(self) -> int:
        """The first position whose hidden state is asked for."""
        if self.kind == "score":
            return self.prompt_length - 1 + len(self.logprobs)
        return 0 if self.mean else len(self.tokens) - 1

    @property
    def reusable_tokens(self) -> int:
        """How many tokens need not be computed where the tree has them."""
        if self.kind == "score":
            return self.prompt_length
        return 0 if self.mean else len(self.tokens)

    def reset_computed(self) -> None:
        """Its blocks are gone: what was sampled stays, all else is computed anew."""
        self.lease = None
        self.hidden = None
        if self.kind == "score":
            self.logprobs, self.entropies = array("f"), array("f")

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
        )
