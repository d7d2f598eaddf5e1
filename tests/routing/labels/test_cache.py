"""The cache of answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.errors import DataError
from toolwise.routing.labels.cache import AnswerCache

ONE, TWO = {"q": 1, "r": [1]}, {"q": 2}


def test_answers_are_on_disk_immediately(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "new" / "c.jsonl")
    assert cache.get(ONE) is None
    cache.put(ONE, "yes")
    other = AnswerCache(tmp_path / "new" / "c.jsonl")  # the first is still open: as after a kill
    assert (other.get({"r": [1], "q": 1}), other.get(TWO), len(other)) == ("yes", None, 1)
    cache.close()


def test_a_truncated_line_is_skipped_and_the_next_one_intact(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    first = AnswerCache(path)
    first.put(ONE, "yes")
    first.close()
    path.write_text(path.read_text() + '{"key": "abc", "ans')
    second = AnswerCache(path)
    second.put(TWO, "no")
    second.close()
    third = AnswerCache(path)
    assert (third.get(ONE), third.get(TWO), len(third)) == ("yes", "no", 2)


def test_a_cache_that_is_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--cache"):
        AnswerCache(tmp_path)
