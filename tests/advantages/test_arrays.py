"""The array core: integer codes, group statistics, discounted sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages.arrays import (
    CreditError,
    check_choice,
    check_fraction,
    compact_codes,
    discounted_sums,
    integer_codes,
    normalize,
    pair_codes,
    whiten,
)
from toolwise.errors import ToolwiseError

CODES = st.lists(st.integers(-5, 5) | st.integers(-(2**40), 2**40), min_size=1, max_size=40)
VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=40)


def partition(codes: object) -> set[frozenset[int]]:
    """The sets of positions with equal codes."""
    places: dict[object, set[int]] = {}
    for place, code in enumerate(codes):  # type: ignore[arg-type,var-annotated]
        places.setdefault(code, set()).add(place)
    return {frozenset(found) for found in places.values()}


def test_codes_number_keys() -> None:
    assert integer_codes(["b", "a", "b", ("c", 1), "a"]).tolist() == [0, 1, 0, 2, 1]
    assert integer_codes("gg").tolist() == [0, 0]
    assert integer_codes([]).tolist() == []


@pytest.mark.parametrize("keys", [np.array([4, 4, 5]), torch.tensor([4, 4, 9]), np.array(["x", "x", "y"], object)])
def test_codes_of_arrays_and_tensors_go_by_value(keys: object) -> None:
    assert integer_codes(keys).tolist() == [0, 0, 1]


@given(CODES)
def test_narrow_codes_keep_the_partition_and_take_little_room(codes: list[int]) -> None:
    found, room = compact_codes(np.array(codes, dtype=np.intp))
    assert partition(found.tolist()) == partition(codes)
    assert 0 <= min(found) <= max(found) < room <= 4 * len(codes)


@pytest.mark.parametrize("apart", [1, 3, 30, 10**9])
def test_narrow_codes_however_far_apart(apart: int) -> None:
    codes = np.array([5, -2, 5, 0, 4, -2]) * apart
    found, room = compact_codes(codes)
    assert partition(found.tolist()) == partition(codes.tolist())
    assert room <= 4 * len(codes)


@given(CODES, CODES)
def test_pairs_are_equal_where_both_parts_are(first: list[int], second: list[int]) -> None:
    n = min(len(first), len(second))
    found, room = pair_codes(np.array(first[:n], dtype=np.intp), np.array(second[:n], dtype=np.intp))
    assert partition(found.tolist()) == partition(list(zip(first[:n], second[:n], strict=True)))
    assert max(found) < room


def test_nothing_has_no_codes() -> None:
    none = np.zeros(0, dtype=np.intp)
    assert compact_codes(none)[1] == 0
    assert pair_codes(none, none)[1] == 0


def test_normalize_hand_worked() -> None:
    # Group 0: 1, 0, 5 has mean 2 and sample variance (1 + 4 + 9) / 2 = 7. Group 1: 4 alone.
    x, groups = np.array([1.0, 4.0, 0.0, 5.0]), np.array([0, 1, 0, 0])
    root = np.sqrt(7) + 1e-6
    assert normalize(x, groups) == pytest.approx([-1 / root, 0, -2 / root, 3 / root], rel=1e-12)
    assert normalize(x, groups, "mean_norm").tolist() == [-1, 0, -2, 3]
    # Against the mean of the others: 1 − 5/2, 0 − 6/2, 5 − 1/2.
    assert normalize(x, groups, "leave_one_out") == pytest.approx([-1.5, 0, -3, 4.5], rel=1e-12)


@pytest.mark.parametrize("how", ["mean_std_norm", "mean_norm", "leave_one_out"])
def test_equal_values_and_groups_of_one_are_exactly_zero(how: str) -> None:
    x = np.array([0.1] * 7 + [3.3])
    assert normalize(x, np.array([0] * 7 + [1]), how).tolist() == [0.0] * 8  # type: ignore[arg-type]


def test_a_group_number_that_nobody_has_does_no_harm() -> None:
    assert normalize(np.array([1.0, 3.0]), np.array([5, 5]), "mean_norm").tolist() == [-1.0, 1.0]


@given(VALUES)
def test_whitening_gives_mean_zero_and_variance_one(values: list[float]) -> None:
    x = np.array(values)
    found = whiten(x)
    if len(set(values)) == 1:
        assert found.tolist() == [0.0] * len(values)
    elif np.std(values) > 1e-2:
        assert found.mean() == pytest.approx(0, abs=1e-9)
        assert found.var(ddof=1) == pytest.approx(1, abs=1e-3)


@given(st.lists(VALUES | st.just([]), max_size=8), st.floats(0, 1))
def test_discounted_sums_are_the_recursion_s(stretches: list[list[float]], factor: float) -> None:
    expected: list[float] = []
    for stretch in stretches:
        running, sums = 0.0, []
        for value in reversed(stretch):
            running = value + factor * running
            sums.append(running)
        expected += reversed(sums)
    flat = np.array([x for stretch in stretches for x in stretch], dtype=np.float64)
    found = discounted_sums(flat, np.array([len(s) for s in stretches], dtype=np.intp), factor)
    assert found == pytest.approx(np.array(expected), abs=1e-9)


def test_a_sum_depends_on_what_lies_ahead_alone_to_the_last_bit() -> None:
    ahead = np.random.default_rng(0).normal(size=13)
    alone = discounted_sums(ahead, np.array([13]), 0.9)
    longer = discounted_sums(np.concatenate([[5.0] * 8, ahead]), np.array([3, 18]), 0.9)
    assert longer[8:].tolist() == alone.tolist()


def test_discounted_sums_leave_their_input_alone() -> None:
    x = np.ones(3)
    discounted_sums(x, np.array([3]), 1.0)
    assert x.tolist() == [1, 1, 1]


def test_wrong_settings_are_told_in_one_line() -> None:
    with pytest.raises(CreditError, match=r"gamma is 1\.5; it must lie between 0 and 1"):
        check_fraction("gamma", 1.5)
    with pytest.raises(CreditError, match="nan"):
        check_fraction("gamma", float("nan"))
    with pytest.raises(ToolwiseError, match="combine is 'sum'; choose one of convex, additive"):
        check_choice("combine", "sum", ("convex", "additive"))
