"""Text spans to token spans: with a real tokenizer, multi-token characters and multi-character tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.models import load_model
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.thinking.parsed_step import find_tokens, token_spans
from toolwise.thinking.reply import parse_reply


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return load_model("builtin:small", device="cpu")[1]


def encode(chat: ChatTokenizer, text: str) -> list[int]:
    ids: list[int] = chat.tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_the_parts_of_a_reply_are_found_among_its_tokens(chat: ChatTokenizer) -> None:
    text = "<level>3</level><think>State: the door is open. 你好</think><action>go left</action>"
    ids = [*encode(chat, text), chat.end_id]
    spans = token_spans(ids, chat.decode)
    assert chat.decode([ids[i] for i in spans.level]) == "3"
    assert chat.decode([ids[i] for i in spans.thought]) == "State: the door is open. 你好"
    assert chat.decode([ids[i] for i in spans.action]) == "go left"
    assert chat.decode([ids[i] for i in spans.head]) == text.partition("<action>")[0]
    assert spans.action.start == spans.head.stop + 1  # `<action>` is between them


def test_missing_parts_have_no_tokens(chat: ChatTokenizer) -> None:
    spans = token_spans(encode(chat, "<level>1</level><action></action>"), chat.decode)
    assert (len(spans.level), len(spans.thought), len(spans.action), len(spans.head)) == (1, 0, 0, 3)
    nothing = token_spans([], chat.decode)
    assert not any((nothing.level, nothing.thought, nothing.action, nothing.head))


def test_an_answer_is_scored_to_its_last_token(chat: ChatTokenizer) -> None:
    ids = encode(chat, "<level>2</level><think>6 x 7</think> Answer: 42")
    spans = token_spans(ids, chat.decode)
    assert chat.decode([ids[i] for i in spans.action]).strip() == "Answer: 42"
    assert spans.action.stop == len(ids)


def test_ids_that_the_tokenizer_would_not_have_chosen(chat: ChatTokenizer) -> None:
    """A model may write "go" as "g", "o"; what was sampled is what counts."""
    apart = [*encode(chat, "<level>1</level><action>"), *encode(chat, "t"), *encode(chat, "a"), *encode(chat, "ke")]
    ids = [*apart, *encode(chat, "</action>")]
    spans = token_spans(ids, chat.decode)
    assert chat.decode([ids[i] for i in spans.action]) == "take"
    assert len(spans.action) == 3


def test_a_token_across_the_border_is_in_the_span_but_not_in_the_head() -> None:
    pieces = ["<level>1</level><act", "ion>g", "o</", "action>"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids)

    ids = range(len(pieces))
    spans = token_spans(ids, decode)
    assert list(spans.action) == [1, 2]
    assert list(spans.head) == []  # the first token extends into the action's tag


@given(text=st.text(min_size=1, max_size=12), data=st.data())
def test_byte_tokens_cover_exactly_their_characters(text: str, data: st.DataObject) -> None:
    """The worst tokenizer: one token per byte, so that most prefixes end within a character."""
    raw = text.encode("utf-8", "replace")
    whole = raw.decode("utf-8", "replace")

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    found = find_tokens(list(raw), (start, end), decode)
    assert bytes(raw[i] for i in found) == whole[start:end].encode()


def test_a_parsed_reply_is_used_if_given(chat: ChatTokenizer) -> None:
    ids = encode(chat, "<level>2</level><think>a</think><action>go</action>")
    assert token_spans(ids, chat.decode, parse_reply(chat.decode(ids))) == token_spans(ids, chat.decode)
