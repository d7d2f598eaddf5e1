"""Scheduling: decodes first, chunks within a budget, the latest is preempted, followers wait for their leader."""

from __future__ import annotations

import asyncio
from typing import Any

from block_checks import check_blocks
from engine_cases import random_ids

from toolwise.engine.blocks import BlockManager
from toolwise.engine.request import Request
from toolwise.engine.scheduler import Plan, Scheduler
from toolwise.protocols import Sampling

LOOP: Any = asyncio.new_event_loop()
LOOP.close()


def request(tokens: list[int], sampled: int = 0) -> Request:
    return Request("generate", tokens, len(tokens) - sampled, Sampling(), asyncio.Future(loop=LOOP), LOOP)


def scheduler(blocks: int = 64, tokens: int = 16, requests: int = 8, **more: Any) -> Scheduler:
    made = BlockManager(blocks, 4, full_blocks_only=more.get("fixed_chunks", False))
    return Scheduler(made, max_batch_tokens=tokens, max_requests=requests, **more)


def computed(on: Scheduler, plan: Plan, *, draw: bool = True) -> None:
    """Stands in for a forward pass: everything planned is computed, and finished prompts get a token."""
    for r, count in plan.items():
        on.blocks.commit(r.lease, r.tokens, r.held + count)
        if draw and not r.pending:
            r.tokens.append(7)


def test_prompts_are_cut_to_the_budget_and_go_on_where_they_were() -> None:
    on = scheduler(tokens=16)
    long = request(random_ids(40, 1))
    on.add(long)
    counts = []
    for _ in range(4):
        plan = on.schedule()
        counts.append(plan[long])
        computed(on, plan)
    assert counts == [16, 16, 8, 1]


def test_those_who_decode_come_before_prompts() -> None:
    on = scheduler(tokens=8)
    first, second = request(random_ids(30, 1)), request(random_ids(5, 2))
    for r in (first, second):
        on.add(r)
    computed(on, on.schedule())
    on.waiting.remove(second)
    on.running.append(second)
    second.lease = on.blocks.open(second.tokens, end=4)
    assert on.blocks.extend(second.lease, 4)
    on.blocks.commit(second.lease, second.tokens, 4)
    plan = on.schedule()
    assert list(plan) == [second, first]
    assert list(plan.values()) == [1, 7]


def test_no_more_run_than_allowed() -> None:
    on = scheduler(tokens=100, requests=3)
    for i in range(5):
        on.add(request(random_ids(6, i)))
    assert len(on.schedule()) == 3
    assert len(on.waiting) == 2


def test_the_last_to_come_gives_way_and_comes_back_first() -> None:
    on = scheduler(blocks=6, tokens=32)
    early, late = request(random_ids(11, 1)), request(random_ids(7, 2))
    later = request(random_ids(7, 3))
    for r in (early, late, later):
        on.add(r)
    computed(on, on.schedule())
    assert on.running == [early, late]
    for _ in range(12):
        computed(on, on.schedule())
        if on.preemptions:
            break
    assert on.preemptions == 1
    assert early in on.running
    assert on.waiting == [late, later]
    assert late.tokens[7:], "what was sampled stays"
    check_blocks(on.blocks, (r.lease for r in on.running))


def test_one_who_needs_what_another_computes_waits_for_it() -> None:
    on = scheduler(tokens=64)
    ids = random_ids(10, 1)
    leader, twin = request(ids), request(list(ids))
    other = request(random_ids(10, 9))
    for r in (leader, twin, other):
        on.add(r)
    plan = on.schedule()
    assert list(plan) == [leader, other]
    assert leader.has_followers
    computed(on, plan)
    plan = on.schedule()
    assert plan[twin] == 2, "the full blocks are there, and the rest it computes itself unless it was frozen"


def test_followers_come_in_as_soon_as_the_tree_has_their_prompt() -> None:
    on = scheduler(tokens=64)
    ids = random_ids(10, 1)
    leader, follower, alone = request(ids), request([*ids, 3]), request(random_ids(10, 9))
    for r in (leader, follower, alone):
        on.add(r)
    plan = on.schedule()
    assert on.waiting == [follower]
    computed(on, plan)
    assert on.admit_followers() == {}, "it has tokens of its own to compute"
    assert on.running == [leader, follower, alone]
    assert on.admit_followers() == {}
    assert on.schedule()[follower] == follower.pending
    check_blocks(on.blocks, (r.lease for r in on.running))


def test_without_followers_nobody_comes_in_early() -> None:
    on = scheduler(tokens=8)
    first, second = request(random_ids(8, 1)), request(random_ids(8, 9))
    for r in (first, second):
        on.add(r)
    computed(on, on.schedule())
    assert on.admit_followers() == {}
    assert on.waiting == [second], "its turn comes when those who are done have left"


def test_a_leader_that_goes_away_keeps_nobody_waiting() -> None:
    on = scheduler(tokens=4)
    ids = random_ids(10, 1)
    leader, twin = request(ids), request(list(ids))
    for r in (leader, twin):
        on.add(r)
    on.schedule()
    on.finish(leader)
    assert list(on.schedule()) == [twin]


def test_finishing_gives_everything_back() -> None:
    on = scheduler()
    one = request(random_ids(10, 1))
    on.add(one)
    computed(on, on.schedule())
    on.finish(one)
    assert (on.running, on.waiting, on.blocks.in_use) == ([], [], 0)
    on.finish(one)
    check_blocks(on.blocks, [])


def test_fixed_pieces_do_not_depend_on_the_room_there_is() -> None:
    on = scheduler(tokens=6, fixed_chunks=True)
    one, two = request(random_ids(10, 1)), request(random_ids(10, 2))
    for r in (one, two):
        on.add(r)
    seen: dict[Request, list[tuple[int, int]]] = {one: [], two: []}
    for _ in range(12):
        plan = on.schedule()
        for r, count in plan.items():
            seen[r] += list(on.chunks(r, count))
        computed(on, plan)
    for chunks in seen.values():
        assert chunks[:5] == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]
