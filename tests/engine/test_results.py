"""Results of a forward pass: cached hidden states come first, and prompt ends are kept for followers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch
from block_checks import check_blocks
from engine_cases import VOCABULARY, random_ids, tiny

from toolwise.engine.blocks import BlockManager
from toolwise.engine.request import Request
from toolwise.engine.results import OutputProcessor
from toolwise.engine.scheduler import Scheduler
from toolwise.models.logits import logits_head
from toolwise.protocols import Sampling

LOOP: Any = asyncio.new_event_loop()
LOOP.close()
GREEDY = Sampling(max_new_tokens=3, do_sample=False)


def request(tokens: list[int], kind: Any = "generate", sampling: Sampling = GREEDY, **more: Any) -> Request:
    return Request(kind, tokens, len(tokens), sampling, asyncio.Future(loop=LOOP), LOOP, **more)


def made() -> tuple[OutputProcessor, Scheduler, Any]:
    model = tiny("llama")
    blocks = BlockManager(32, 4)
    head = logits_head(model)
    return OutputProcessor(blocks, head, None), Scheduler(blocks, max_batch_tokens=64, max_requests=8), head


def test_a_token_is_drawn_stamped_and_counted() -> None:
    results, scheduler, head = made()
    one = request(random_ids(6, 1))
    scheduler.add(one)
    states = torch.randn(1, 32)
    done = results.process_step(scheduler.schedule(), states, {one: [0]}, 9)
    assert done == []
    assert one.tokens[6:] == [int(head(states).argmax())]
    assert list(one.versions) == [9]
    assert (one.held, one.pending) == (6, 1)
    assert (results.prefilled_tokens, results.decoded_tokens) == (6, 0)


def test_those_at_their_full_length_are_done() -> None:
    results, scheduler, _ = made()
    one = request(random_ids(6, 1))
    scheduler.add(one)
    ends = [results.process_step(scheduler.schedule(), torch.randn(1, 32), {one: [0]}, 0) for _ in range(3)]
    assert ends == [[], [], [one]]
    assert results.decoded_tokens == 2
    assert one.result().finish_reason == "length"


def test_a_first_token_that_is_a_stop_token_ends_the_request() -> None:
    results, scheduler, head = made()
    states = torch.randn(1, 32)
    stop = int(head(states).argmax())
    one = request(random_ids(6, 1), sampling=replace(GREEDY, stop_token_ids=(stop,)))
    scheduler.add(one)
    assert results.process_step(scheduler.schedule(), states, {one: [0]}, 0) == [one]
    assert (list(one.result().token_ids), one.result().finish_reason) == ([stop], "stop")


def test_a_followed_prompt_leaves_its_end_for_others() -> None:
    results, scheduler, _ = made()
    ids = random_ids(6, 1)
    leader, twin = request(ids), request(list(ids))
    for r in (leader, twin):
        scheduler.add(r)
    state = torch.randn(1, 32)
    results.process_step(scheduler.schedule(), state, {leader: [0]}, 0)
    plan = scheduler.schedule()
    assert plan == {leader: 1, twin: 0}
    results.process_step(plan, torch.randn(1, 32), {leader: [0]}, 0)
    assert twin.tokens[6] == leader.tokens[6], "drawn from the state that the leader left"
    assert results.prefilled_tokens == 6


def test_whoever_waited_for_a_whole_prompt_is_drawn_in_the_same_step() -> None:
    results, scheduler, _ = made()
    ids = random_ids(6, 1)
    leader, twin, longer = request(ids), request(list(ids)), request([*ids, 7])
    for r in (leader, twin, longer):
        scheduler.add(r)
    results.process_step(scheduler.schedule(), torch.randn(1, 32), {leader: [0]}, 0, scheduler.admit_followers)
    assert (twin.sampled, leader.sampled, longer.sampled) == (1, 1, 0)
    assert scheduler.running == [leader, twin, longer], "who has a token of its own runs next"
    assert scheduler.schedule() == {leader: 1, twin: 1, longer: 1}
    check_blocks(scheduler.blocks, (r.lease for r in scheduler.running))


def test_scores_come_in_pieces() -> None:
    results, scheduler, head = made()
    targets = random_ids(5, 3)
    one = request(random_ids(8, 1), "score", targets=targets)
    one.prompt_length = 4
    scheduler.max_batch_tokens = 6
    scheduler.add(one)
    states = torch.randn(5, 32)
    assert results.process_step(scheduler.schedule(), states[:3], {one: [0, 1, 2]}, 0) == []
    assert results.process_step(scheduler.schedule(), states[3:], {one: [0, 1]}, 0) == [one]
    expected = torch.log_softmax(head(states), -1)[range(5), targets]
    torch.testing.assert_close(torch.tensor(list(one.result().logprobs)), expected.detach())
    assert max(targets) < VOCABULARY


def test_a_mean_adds_up_over_chunks() -> None:
    results, scheduler, _ = made()
    one = request(random_ids(8, 1), "read", mean=True)
    scheduler.max_batch_tokens = 5
    scheduler.add(one)
    states = torch.randn(8, 32)
    results.process_step(scheduler.schedule(), states[:5], {one: [0, 1, 2, 3, 4]}, 0)
    assert results.process_step(scheduler.schedule(), states[5:], {one: [0, 1, 2]}, 0) == [one]
    torch.testing.assert_close(one.result(), states.mean(0))
