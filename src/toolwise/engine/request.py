"""One request to the engine: tokens to continue, to score or to encode, and the results so far."""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from toolwise.engine.blocks import BlockManager, Lease
from toolwise.errors import ContextFullError
from toolwise.protocols import Generation, Sampling

LogitsMask = Callable[[Sequence[int]], Any]
"""Maps the tokens sampled so far to a bool tensor over the vocabulary, true for allowed ones; None allows all."""
OnTokens = Callable[[Sequence[int]], None]
"""Receives newly sampled tokens, in the event loop of the request."""
Kind = Literal["generate", "score", "read"]


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
    reported: int = 0
    """Number of sampled tokens that `on_tokens` has received."""
    mean: bool = False
    """read: the mean of all hidden states instead of the last one; computes every token, cached or not."""

    number: int = -1
    """Order of arrival: decides who goes first and who is preempted."""
    lease: Lease = field(default_factory=Lease)
    """Empty unless it runs."""
    has_followers: bool = False
    """Other requests wait for this prompt: its end must be kept for them."""
    cancelled: bool = False
    stopped: bool = False
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    entropies: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("q"))
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
    def decodes_freely(self) -> bool:
        """Whether its next tokens depend on nothing but the model, so that many can be decoded at once."""
        return self.kind == "generate" and self.pending == 1 and not self.stop_strings and self.logits_mask is None

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


def check_length(tokens: int, new_tokens: int, max_context: int, blocks: BlockManager) -> None:
    """Reject a prompt that cannot fit, before it can fail the whole batch."""
    what = f"a prompt of {tokens} tokens and {new_tokens} new ones do not fit"
    if tokens + new_tokens > max_context:
        raise ContextFullError(f"{what} the model's {max_context}: shorten the prompt or lower rollout.max_new_tokens")
    if blocks.needed(tokens + new_tokens) > blocks.count:
        raise ContextFullError(
            f"{what} the engine's cache of {blocks.count * blocks.size} tokens: give it more memory, or shorten the "
            "prompt"
        )


def report_tokens(requests: Iterable[Request]) -> None:
    """Tell each request that streams its new tokens."""
    for request in requests:
        if request.on_tokens is not None and request.sampled > request.reported:
            new = request.tokens[request.prompt_length + request.reported :]
            request.reported = request.sampled
            with suppress(RuntimeError):  # the loop is closed, so no caller waits there
                request.loop.call_soon_threadsafe(request.on_tokens, new)


def deliver(finished: Iterable[Request]) -> None:
    """Hand each event loop the results of its requests, in one call per loop; at once to the loop that runs here."""
    here = asyncio._get_running_loop()
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = defaultdict(list)
    for request in finished:
        by_loop[request.loop].append(request)
    for loop, requests in by_loop.items():
        if loop is here:
            _resolve(requests)
            continue
        try:
            loop.call_soon_threadsafe(_resolve, requests)
        except RuntimeError:  # the loop is closed, so no caller waits there
            continue


def _resolve(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.future.done():
            continue
        if request.fault is not None:
            request.future.set_exception(request.fault)
        else:
            request.future.set_result(request.result())
