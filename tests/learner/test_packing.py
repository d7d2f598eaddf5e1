"""Packing: every sampled token once per row, no token computed twice, never over the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import pack

from toolwise.learner.packing import Packed
from toolwise.learner.rows import Row


@dataclass(frozen=True)
class Tokens:
    """A row as packing sees it."""

    ids: list[int]
    sampled: list[bool]


def row(prompt: list[int], reply: list[int]) -> Tokens:
    return Tokens([*prompt, *reply], [False] * len(prompt) + [True] * len(reply))


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Few distinct ids, so that rows share prompts, sampled tokens or everything."""
    ids = draw(st.lists(st.integers(0, 2), max_size=8))
    return Tokens(ids, draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))


def path_of(packed: Packed, place: int) -> list[int]:
    """The ids that the token at `place` sees, itself last."""
    segment = next(s for s in packed.segments if s.start <= place < s.stop)
    spans = [*segment.path, (segment.start, place + 1)]
    return [i for start, stop in spans for i in packed.ids[start:stop].tolist()]


def needed(row: Tokens) -> tuple[int, ...]:
    """What must be computed to predict all sampled tokens of a row."""
    at = [i for i, sampled in enumerate(row.sampled) if sampled and i]
    return tuple(row.ids[: at[-1]]) if at else ()


def prefixes(rows: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {ids[:n] for ids in rows for n in range(1, len(ids) + 1)}


@given(st.lists(tokens(), max_size=8), st.integers(1, 40), st.booleans(), st.booleans())
def test_every_sampled_token_appears_once_and_is_predicted_from_its_prefix(
    rows: list[Tokens], budget: int, share: bool, nodes: bool
) -> None:
    found = []
    for packed in pack(rows, budget, share_prefixes=share, nodes=nodes):
        columns = (packed.source, packed.target, packed.row, packed.at)
        for source, target, number, at in zip(*(column.tolist() for column in columns), strict=True):
            assert path_of(packed, source) == rows[number].ids[:at]
            assert target == rows[number].ids[at]
            found.append((number, at))
    wanted = [(n, at) for n, row in enumerate(rows) for at in range(1, len(row.ids)) if row.sampled[at]]
    assert sorted(found) == wanted


@given(st.lists(tokens(), max_size=8))
def test_with_enough_room_no_token_is_computed_twice_or_needlessly(rows: list[Tokens]) -> None:
    batches = pack(rows, 10_000)
    assert sum(packed.T for packed in batches) == len(prefixes([needed(row) for row in rows]))
    assert len(batches) <= 1


@given(st.lists(tokens(), max_size=8), st.integers(1, 20), st.booleans(), st.booleans())
def test_a_micro_batch_keeps_to_the_budget_unless_one_row_alone_is_over_it(
    rows: list[Tokens], budget: int, share: bool, nodes: bool
) -> None:
    for packed in pack(rows, budget, share_prefixes=share, nodes=nodes):
        holds = {needed(rows[number]) for number in packed.row.tolist()}
        assert budget >= packed.T or len(packed.row.unique()) == 1
        assert not share or nodes or len(prefixes(list(holds))) == packed.T


@given(st.lists(tokens(), max_size=8), st.integers(1, 20), st.booleans(), st.booleans())
def test_positions_are_depths(rows: list[Tokens], budget: int, share: bool, nodes: bool) -> None:
    for packed in pack(rows, budget, share_prefixes=share, nodes=nodes):
        assert packed.positions.tolist() == [len(path_of(packed, place)) - 1 for place in range(packed.T)]


@pytest.mark.parametrize("nodes", [False, True])
def test_positions_after_a_shared_prompt_by_hand(nodes: bool) -> None:
    [packed] = pack([row([1, 2], [3, 4]), row([1, 2], [5, 6])], 100, nodes=nodes)
    assert packed.ids.tolist() == [1, 2, 3, 5]
    assert packed.positions.tolist() == [0, 1, 2, 2]


@given(st.lists(tokens(), max_size=8), st.booleans())
def test_predictors_are_the_distinct_sources(rows: list[Tokens], share: bool) -> None:
    for packed in pack(rows, 30, share_prefixes=share):
        assert packed.predictors.tolist() == sorted(set(packed.source.tolist()))
        assert torch.equal(packed.predictors[packed.predicted_by], packed.source)
        assert torch.equal(packed.predicted_by.bincount(), torch.tensor(packed.predicted))


def test_flat_rows_share_nothing() -> None:
    packed = pack([row([1, 2], [3]), row([1, 2], [3])], 100, share_prefixes=False)[0]
    assert packed.T == 4
    assert all(not segment.path for segment in packed.segments)


def test_the_last_shared_token_predicts_several_next_tokens() -> None:
    packed = pack([row([7, 8, 9], [1, 1]), row([7, 8, 9], [2, 2]), row([7, 8, 9], [3])], 100)[0]
    assert packed.T == 5
    assert sorted(packed.target[packed.source == 2].tolist()) == [1, 2, 3]


def test_identical_rows_are_computed_once_and_counted_each() -> None:
    packed = pack([row([1, 2], [3, 4])] * 3, 100)[0]
    assert (packed.T, packed.S) == (3, 6)
    assert packed.predicted == (3, 3)


def test_a_prefix_too_long_for_the_budget_is_computed_again() -> None:
    rows = [row(list(range(50)), [100 + i, 1, 2, 3]) for i in range(4)]
    batches = pack(rows, 56)
    assert [packed.T for packed in batches] == [56, 56]
    assert sorted(int(i) for packed in batches for i in packed.row.unique()) == [0, 1, 2, 3]


def test_groups_are_not_split_to_fill_a_micro_batch() -> None:
    groups = [[row([g] * 20, [100 + k, k, k, k]) for k in range(4)] for g in range(5)]  # 20 + 4 x 3 tokens per group
    batches = pack([r for group in groups for r in group], 80)
    assert sorted(packed.T for packed in batches) == [32, 64, 64]


def test_nothing_sampled_is_nothing_to_compute() -> None:
    assert pack([], 10) == []
    assert pack([Tokens([], []), Tokens([1, 2], [False, False]), Tokens([5], [True])], 10) == []


def test_what_follows_the_last_sampled_token_is_not_computed() -> None:
    packed = pack([Tokens([1, 2, 3, 4, 5, 6], [False, False, True, False, False, False])], 10)[0]
    assert packed.ids.tolist() == [1, 2]


def test_rows_of_the_learner_are_rows() -> None:
    packed = pack([Row("a", np.array([1, 2, 3]), np.array([False, True, True]))], 10)[0]
    assert packed.at.tolist() == [1, 2]
