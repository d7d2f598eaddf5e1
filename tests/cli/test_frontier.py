"""Parsing of `--budgets`; all of `eval --budgets` is tested in test_run.py."""

from __future__ import annotations

import pytest

from toolwise.cli.frontier import read_budgets
from toolwise.errors import ConfigError


def test_an_ellipsis_continues_the_budgets() -> None:
    assert read_budgets("0,0.1,…,1") == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert read_budgets("0, 0.25, ..., 1, 3") == [0.0, 0.25, 0.5, 0.75, 1.0, 3.0]


def test_budgets_are_sorted_and_unique() -> None:
    assert read_budgets("0.6,0.2,0.6") == [0.2, 0.6]


@pytest.mark.parametrize("text", ["", "x", ",", "0,…", "…,1", "0,…,1", "1,0.5,…,0", "0,1e-9,…,1", "-1", "nan", "inf"])
def test_budgets_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--budgets"):
        read_budgets(text)
