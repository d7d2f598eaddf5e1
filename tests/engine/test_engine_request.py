"""What a request needs from the next forward pass, and its result."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import torch

from toolwise.engine.blocks import Lease
from toolwise.engine.request import ContinuationScores, Request
from toolwise.protocols import Generation, Sampling

LOOP: Any = asyncio.new_event_loop()
LOOP.close()


def request(kind: Any, tokens: int, prompt: int, **more: Any) -> Request:
    return Request(kind, list(range(tokens)), prompt, Sampling(), asyncio.Future(loop=LOOP), LOOP, **more)


def test_what_is_pending_is_what_is_not_held() -> None:
    one = request("generate", 9, 7)
    assert (one.held, one.pending, one.sampled) == (0, 9, 2)
    one.lease = Lease(held=8)
    assert (one.held, one.pending) == (8, 1)


def test_which_states_are_wanted_and_which_tokens_may_be_found() -> None:
    assert (request("generate", 9, 7).first_output_position, request("generate", 9, 7).reusable_tokens) == (8, 9)
    assert (request("score", 9, 7).first_output_position, request("score", 9, 7).reusable_tokens) == (6, 7)
    assert (request("read", 9, 9).first_output_position, request("read", 9, 9).reusable_tokens) == (8, 9)
    assert (
        request("read", 9, 9, mean=True).first_output_position,
        request("read", 9, 9, mean=True).reusable_tokens,
    ) == (0, 0)


def test_whoever_starts_again_keeps_what_was_sampled_and_nothing_else() -> None:
    one = request("generate", 9, 7)
    one.logprobs.extend([-1.0, -2.0])
    one.lease = Lease(held=8)
    one.reset_computed()
    assert (one.lease, one.sampled, len(one.logprobs)) == (Lease(), 2, 2)
    scored = request("score", 9, 7)
    scored.logprobs.append(-1.0)
    scored.reset_computed()
    assert len(scored.logprobs) == 0


def test_results_by_kind() -> None:
    reply = request("generate", 9, 7)
    reply.logprobs.extend([-1.0, -2.0])
    reply.versions.extend([3, 3])
    assert reply.result() == Generation(array("i", [7, 8]), array("f", [-1.0, -2.0]), "length", 3)
    reply.versions[1] = 4
    reply.stopped = True
    assert reply.result() == Generation(array("i", [7, 8]), array("f", [-1.0, -2.0]), "stop", 3, array("q", [3, 4]))
    assert request("score", 9, 7).result() == ContinuationScores(array("f"), array("f"))
    read = request("read", 4, 4, mean=True)
    read.hidden = torch.tensor([4.0, 8.0], dtype=torch.bfloat16)
    assert read.result().tolist() == [1.0, 2.0]
