"""The prefix tree: holding, finding, sharing, copying and evicting blocks, with every block accounted for."""

from __future__ import annotations

from typing import Any

import pytest
from block_checks import check_blocks
from hypothesis import given
from hypothesis import strategies as st

from toolwise.engine.blocks import BlockManager, Lease

SIZE = 4


def computed(blocks: BlockManager, tokens: list[int]) -> Lease:
    """A request that reused the cached prefix and computed the rest."""
    lease = blocks.open(tokens, end=len(tokens))
    assert blocks.extend(lease, len(tokens))
    blocks.commit(lease, tokens, len(tokens))
    return lease


def test_nothing_is_held_in_an_empty_tree() -> None:
    lease = BlockManager(8, SIZE).open([1, 2, 3], end=3)
    assert lease == Lease()


def test_full_blocks_are_shared_and_the_last_token_is_left_to_run() -> None:
    blocks = BlockManager(8, SIZE)
    one = computed(blocks, [*range(8)])
    two = blocks.open([*range(8)], end=8)
    assert two.held == 7
    assert two.table[0] == one.table[0]
    assert two.table[1] != one.table[1], "the block to write into is a copy"
    assert blocks.copies == {two.table[1]: one.table[1]}
    check_blocks(blocks, [one, two])


def test_all_is_held_where_the_last_hidden_state_is_there() -> None:
    blocks = BlockManager(8, SIZE)
    for length in (8, 6):
        lease = computed(blocks, [*range(length)])
        blocks.close(lease, [*range(length)], f"state {length}")
    for length in (8, 6):
        lease = blocks.open([*range(length)], end=length)
        assert (lease.held, lease.hidden) == (length, f"state {length}")
        blocks.close(lease, [*range(length)])
    lease = blocks.open([*range(7)], end=7)
    assert (lease.held, lease.hidden) == (6, None), "the state of another token is none of its own"
    blocks.close(lease, [*range(7)])
    check_blocks(blocks, [])


def test_a_partly_filled_block_is_copied_before_it_is_written_to() -> None:
    blocks = BlockManager(8, SIZE)
    first = computed(blocks, [1, 2, 3, 4, 5, 6])
    source = first.table[1]
    blocks.close(first, [1, 2, 3, 4, 5, 6])
    second = blocks.open([1, 2, 3, 4, 5, 6, 7, 8, 9], end=9)
    assert second.held == 6
    assert blocks.copies == {second.table[1]: source}
    check_blocks(blocks, [second])


def test_the_child_with_most_in_common_is_copied() -> None:
    blocks = BlockManager(16, SIZE)
    for tail in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [9, 9, 9, 9]):
        blocks.close(computed(blocks, [1, 2, 3, 4, *tail]), [1, 2, 3, 4, *tail])
    assert blocks.open([1, 2, 3, 4, 5, 6, 9, 0], end=8).held == 7
    assert blocks.open([1, 2, 3, 4, 5, 6, 8, 0], end=8).held == 6
    assert blocks.open([1, 2, 3, 4, 0, 0, 0, 0], end=8).held == 4


def test_prompts_are_compared_beyond_their_first_block() -> None:
    """Also right after a lookup of a longer common path, from which the next one starts."""
    blocks = BlockManager(16, SIZE)
    tokens = [1, 1, 1, 1, 2, 2, 2, 2, 3]
    one = computed(blocks, tokens)
    assert blocks.open(tokens, end=9).held == 8
    two = blocks.open([1, 1, 1, 1, 4, 4, 4, 4, 3], end=9)
    assert (two.held, two.table) == (4, one.table[:1])


def test_two_who_computed_the_same_keep_one() -> None:
    blocks = BlockManager(8, SIZE)
    tokens = [1, 2, 3, 4, 5]
    one, two = (blocks.open(tokens, end=5) for _ in range(2))
    for lease in (one, two):
        assert blocks.extend(lease, 5)
    for lease in (one, two):
        blocks.commit(lease, tokens, 5)
    assert one.table[0] == two.table[0]
    assert blocks.in_use == 3
    check_blocks(blocks, [one, two])


def test_the_oldest_leaf_gives_way_and_its_parent_after_it() -> None:
    blocks = BlockManager(4, SIZE)
    old, young = [1] * 8, [2] * 8
    for tokens in (old, young):
        blocks.close(computed(blocks, tokens), tokens)
    assert (blocks.in_use, blocks.available) == (0, 4)
    lease = computed(blocks, [3] * 4)
    assert blocks.evictions == 1
    assert blocks.open(young, end=8).held == 7
    assert blocks.open(old, end=8).held < 7
    assert lease.table


def test_what_somebody_holds_is_never_evicted() -> None:
    blocks = BlockManager(3, SIZE)
    lease = computed(blocks, [1] * 8)
    other = blocks.open([2] * 8, end=8)
    assert not blocks.extend(other, 8)
    assert blocks.extend(other, 4)
    assert not blocks.extend(other, 5)
    check_blocks(blocks, [lease, other])


def test_a_frozen_end_serves_others_while_its_maker_goes_on() -> None:
    blocks = BlockManager(8, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    maker = computed(blocks, tokens)
    blocks.share_tail(maker, tokens, "state")
    follower = blocks.open(tokens, end=6)
    assert (follower.held, follower.hidden) == (6, "state")
    assert follower.table[1] != maker.table[1]
    assert set(blocks.copies.values()) == {maker.table[1]}, "what is still to be copied is copied from where it is"
    check_blocks(blocks, [maker, follower])


def test_a_block_that_is_given_to_somebody_else_is_no_longer_copied_to() -> None:
    blocks = BlockManager(3, SIZE)
    tokens = [1, 2]
    maker = computed(blocks, tokens)
    blocks.share_tail(maker, tokens, "state")
    [target] = blocks.copies
    other = blocks.open([9] * 8, end=8)
    assert blocks.extend(other, 8)
    assert target in other.table
    assert blocks.copies == {}


def test_without_sharing_nothing_is_kept() -> None:
    blocks = BlockManager(4, SIZE, share=False)
    blocks.close(computed(blocks, [1] * 6), [1] * 6, "state")
    assert blocks.open([1] * 6, end=6).held == 0


def test_whole_blocks_alone_are_shared_where_bits_matter() -> None:
    blocks = BlockManager(8, SIZE, full_blocks_only=True)
    tokens = [1] * 10
    lease = blocks.open(tokens, end=10)
    assert blocks.extend(lease, 10)
    blocks.commit(lease, tokens, 10, share_up_to=7)
    blocks.close(lease, tokens, "state")
    assert blocks.open(tokens, end=10).held == 4
    assert blocks.copies == {}


def test_clear_forgets_all_but_what_is_held() -> None:
    blocks = BlockManager(8, SIZE)
    blocks.close(computed(blocks, [1] * 6), [1] * 6)
    held = computed(blocks, [2] * 6)
    blocks.clear()
    assert blocks.open([1] * 6, end=6).held == 0
    again = blocks.open([2] * 6, end=6)
    assert again.held == 4
    for lease in (held, again):
        blocks.close(lease, [2] * 6)
    blocks.clear()
    assert blocks.available == 8
    check_blocks(blocks, [])


def test_what_is_forgotten_is_found_by_nobody_and_stays_with_who_holds_it() -> None:
    blocks = BlockManager(8, SIZE)
    blocks.close(computed(blocks, [1] * 6), [1] * 6)
    held = computed(blocks, [2] * 6)
    table = list(held.table)
    blocks.forget([held])
    check_blocks(blocks, [held])
    assert (held.table, held.held) == (table, 6)
    for tokens in ([1] * 6, [2] * 6):
        assert blocks.open(tokens, end=6).held == 0
    assert blocks.extend(held, 10)
    blocks.commit(held, [2] * 10, 10)
    assert blocks.open([2] * 10, end=10).held == 0
    blocks.close(held, [2] * 10)
    assert blocks.open([2] * 10, end=10).held == 0
    assert blocks.available == 8
    check_blocks(blocks, [])


@pytest.mark.parametrize("spoil", ["lose", "double", "refs"])
def test_the_check_sees_what_is_wrong(spoil: str) -> None:
    blocks = BlockManager(8, SIZE)
    lease = computed(blocks, [1] * 6)
    if spoil == "lose":
        blocks._free.pop()
    elif spoil == "double":
        blocks._free.append(lease.table[0])
    else:
        lease.path[0].refs += 1
    with pytest.raises(AssertionError):
        check_blocks(blocks, [lease])


ACTIONS = ("open", "extend", "commit", "close", "drop", "freeze", "clear", "forget")
actions = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)),
    max_size=60,
)


@given(st.integers(3, 14), st.booleans(), actions)
def test_no_block_is_ever_lost(count: int, share: bool, steps: list[tuple[str, int]]) -> None:
    """Any sequence of requests: references add up, and every cached block was computed by a request, since the tree
    began."""
    blocks = BlockManager(count, SIZE, share=share)
    live: list[tuple[Lease, list[int]]] = []
    seen: set[tuple[int, ...]] = set()
    for what, number in steps:
        if what == "open":
            tokens = [(number >> i) & 1 for i in range(2 + number % 15)]
            lease = blocks.open(tokens, end=len(tokens))
            assert not lease.held or any(known[: lease.held] == tuple(tokens[: lease.held]) for known in seen)
            live.append((lease, tokens))
        elif what == "clear":
            blocks.clear()
        elif what == "forget":
            blocks.forget([lease for lease, _ in live])
            seen.clear()
        elif live:
            lease, tokens = live[number % len(live)]
            apply(blocks, lease, tokens, what, number, seen)
            if what in ("close", "drop"):
                live.pop(number % len(live))
        check_blocks(blocks, [lease for lease, _ in live])
    for lease, tokens in live:
        blocks.close(lease, tokens)
    check_blocks(blocks, [])
    assert blocks.available == count


def apply(
    blocks: BlockManager, lease: Lease, tokens: list[int], what: str, number: int, seen: set[tuple[int, ...]]
) -> Any:
    if what == "extend":
        blocks.extend(lease, min(len(tokens), lease.held + number % 9))
    elif what == "commit":
        held = max(lease.held, min(len(tokens), len(lease.table) * SIZE))
        blocks.commit(lease, tokens, held)
        if not lease.private:
            seen.add(tuple(tokens[:held]))
    elif what == "freeze" and lease.held == len(tokens):
        blocks.share_tail(lease, tokens, "state")
    elif what in ("close", "drop"):
        blocks.close(lease, tokens, keep=what == "close")


def test_blocks_for_tokens_that_were_not_computed_are_given_back() -> None:
    blocks = BlockManager(16, 4)
    lease = blocks.open(list(range(6)), end=6)
    assert blocks.extend(lease, 40)
    assert blocks.available == 6
    blocks.commit(lease, list(range(9)), 9)
    blocks.trim(lease, 9)
    assert len(lease.table) == 3
    assert blocks.available == 13
    check_blocks(blocks, [lease])
    blocks.trim(lease, 9)
    assert len(lease.table) == 3
    blocks.close(lease, list(range(9)))
    assert blocks.available == 16
