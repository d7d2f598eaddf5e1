"""A stop string ends a reply with the token that completes it, wherever tokens cut characters and words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.rollout.stop_strings import has_stop_string


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def end_of(reply: bytes, stop: str, prompt: bytes = b"?") -> int | None:
    """How many tokens the reply has when it stops."""
    ids = [*prompt, *reply]
    ends = (end for end in range(1, len(reply) + 1) if has_stop_string(decode, ids[: len(prompt) + end], (), [stop], 1))
    return next(ends, None)


@given(st.text("aé€😀�", max_size=20), st.text("aé€😀�", min_size=1, max_size=3))
def test_a_reply_stops_where_its_text_has_the_stop_string(reply: str, stop: str) -> None:
    end, raw = end_of(f"{reply}.".encode(), stop), f"{reply}.".encode()
    if stop not in reply:
        assert end is None
        return
    assert end is not None
    before = raw[: raw.index(stop.encode()) + len(stop.encode())]
    # A replacement character at the end may be a character whose bytes are still to come: the next one decides.
    assert end == len(before) if not stop.endswith("�") else end > len(before)


def test_a_half_character_is_no_replacement_character() -> None:
    assert end_of("aé€😀".encode(), "�") is None
    assert end_of(b"a\xffb", "�") == 3
    assert end_of("é".encode() * 40, "�") is None, "nor is one that the end of a long reply begins with"


def test_a_character_completes_a_stop_string_with_its_last_byte() -> None:
    assert end_of("ab€c".encode(), "b€") == 5


@pytest.mark.parametrize("split", [0, 1, 2])
def test_new_tokens_follow_those_of_the_request(split: int) -> None:
    ids = list(b"?xEND")
    assert has_stop_string(decode, ids[: len(ids) - split], ids[len(ids) - split :], ["END"], 1)
    assert not has_stop_string(decode, list(b"END"), list(b"x"), ["END"], 3), "the prompt is not the reply"


def words(ids: Sequence[int]) -> str:
    """Every token is a word, and a space stands before all but the first; 9 is a full stop."""
    return "".join("." if i == 9 else f" {'abcdefghi'[i]}" for i in ids).removeprefix(" ")


def test_a_space_before_the_first_word_counts() -> None:
    assert has_stop_string(words, [3, 0], (), [" a"], 1)
    assert has_stop_string(words, [3], [0], [" a"], 1)
    assert not has_stop_string(words, [3, 9], (), [" ."], 1)
    assert not has_stop_string(words, [3, 9, 1], (), [" a"], 1)
