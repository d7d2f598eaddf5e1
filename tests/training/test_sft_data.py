"""The conversations of an SFT run: rows, the held-out share, and rows that are too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_world_teacher import conversations

from toolwise.config.sft import SftConfig
from toolwise.errors import ConfigError, DataError
from toolwise.models import load_chat
from toolwise.training.sft_data import fingerprint, held_out_rows, read_conversation, read_conversations, tokenize


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_a_prompt_with_a_response_is_a_conversation() -> None:
    found = read_conversation(Path("x"), 0, {"prompt": "hello", "response": "hi"})
    assert [(m.role, m.content) for m in found.messages] == [("user", "hello"), ("assistant", "hi")]
    assert (found.tools, found.context) == (None, 1)


@pytest.mark.parametrize("completion", ["hi", [{"role": "assistant", "content": "hi"}]])
def test_a_completion_is_a_response(completion: Any) -> None:
    found = read_conversation(Path("x"), 0, {"prompt": "hello", "completion": completion})
    assert [(m.role, m.content) for m in found.messages] == [("user", "hello"), ("assistant", "hi")]
    assert found.context == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "prompt and response; the row's columns are conversat"),
        ({"text": "a", "id": 1}, "expected a list of {role, content}.*; the row's columns are text, id$"),
        ({"prompt": "a"}, "the row's columns are prompt$"),
        ({"prompt": 5, "response": "b"}, "field prompt: expected a text or a list of messages, got a int"),
        ({"prompt": "a", "completion": {}}, "field completion: expected a text or a list of messages, got a dict"),
    ],
)
def test_other_columns_are_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"x: row 2 .*{said}"):
        read_conversation(Path("x"), 2, row)


def test_replies_within_a_prompt_are_not_trained_on() -> None:
    given_prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    found = read_conversation(Path("x"), 0, {"prompt": given_prompt, "response": "d"})
    assert [m.role for m in found.messages] == ["user", "assistant", "user", "assistant"]
    assert len(given_prompt) == 3
    chat = load_chat("builtin:small")
    [row] = tokenize(SftConfig(), chat, [found]).rows
    assert chat.decode(row.ids[row.loss_mask].tolist()) == "d"


def test_tools_are_passed_on() -> None:
    [row] = conversations(1, seed=3)
    found = read_conversation(Path("x"), 0, row)
    assert (found.tools or []) == row["tools"]
    assert found.messages[0].role == "user"


@given(st.integers(2, 200), st.floats(0.001, 0.99), st.integers(0, 5))
def test_a_share_is_held_out_by_the_seed(count: int, fraction: float, seed: int) -> None:
    held_out = held_out_rows(count, fraction, seed)
    assert held_out == held_out_rows(count, fraction, seed)
    assert 1 <= len(set(held_out)) == len(held_out) < count
    assert abs(len(held_out) - count * fraction) <= 1


def test_what_is_held_out_is_not_trained_on() -> None:
    config = SftConfig.model_validate({"data": {"val_fraction": 0.3}})
    rows = [talk(str(i), "x") for i in range(10)]
    train, val = read_conversations(config, rows, None)
    assert (len(train), len(val)) == (7, 3)
    assert sorted(int(c.messages[0].content or "") for c in [*train, *val]) == list(range(10))
    with pytest.raises(ConfigError, match="needs at least 2 conversations, there are 1"):
        read_conversations(config, rows[:1], None)


def test_without_data_it_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"no conversations: set data\.train"):
        read_conversations(SftConfig(), None, None)


def test_long_conversations_are_truncated_or_dropped() -> None:
    chat = load_chat("builtin:small")
    rows = [talk("a", "b"), talk("a", "word " * 100), talk("word " * 100, "b")]
    read = [read_conversation(Path("x"), i, row) for i, row in enumerate(rows)]
    cut = tokenize(SftConfig(row_tokens=32), chat, read)
    assert (len(cut.rows), cut.truncated, cut.dropped) == (2, 1, 1)
    assert max(map(len, cut.rows)) == 32
    left = tokenize(SftConfig(row_tokens=32, too_long="drop"), chat, read)
    assert (len(left.rows), left.truncated, left.dropped) == (1, 0, 2)
    assert left.describe_long(32) == "2 of 3 conversations have more than row_tokens = 32 tokens: 2 dropped"
    assert tokenize(SftConfig(), chat, read[:1]).describe_long(32) is None
    with pytest.raises(DataError, match="nothing to train on: no conversation has a reply within row_tokens = 32"):
        tokenize(SftConfig(row_tokens=32), chat, read[2:])
    with pytest.raises(DataError, match="no conversation fits into row_tokens = 32"):
        tokenize(SftConfig(row_tokens=32, too_long="drop"), chat, read[1:])


def test_replies_are_measured_as_written_with_their_ends() -> None:
    chat = load_chat("builtin:small")
    answers = ["word " * n for n in (1, 2, 3, 40)]
    rows = [talk("a", answer) for answer in answers]
    rows[0]["messages"] += talk("c", "word word")["messages"]  # two turns are two replies
    read = [read_conversation(Path("x"), i, row) for i, row in enumerate(rows)]
    lengths = sorted(len(chat.encode(text)) + 1 for text in (*answers, "word word"))
    for too_long in ("truncate", "drop"):
        split = tokenize(SftConfig(row_tokens=48, too_long=too_long), chat, read)
        assert sorted(split.reply_lengths) == lengths
        assert split.reply_tokens() == {"median": lengths[2], "p95": lengths[-1], "max": lengths[-1]}


def test_a_conversation_that_cannot_be_rendered_names_its_row() -> None:
    chat = load_chat("builtin:small")
    bad = read_conversation(Path("talks.jsonl"), 7, {"messages": [{"role": "user", "content": "only a question"}]})
    with pytest.raises(DataError, match=r"talks\.jsonl: row 7 .*no assistant message"):
        tokenize(SftConfig(), chat, [bad])


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def calling(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": "q"}
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize("where", ["arguments", "schema"])
def test_values_that_are_nested_too_deeply_name_their_row(where: str) -> None:
    deep = {"x": nest(900)}
    schema = {"type": "function", "function": {"name": "f", "parameters": deep}}
    row = calling("f", deep) if where == "arguments" else {**calling("f", {}), "tools": [schema]}
    found = read_conversation(Path("talks.jsonl"), 3, row)
    with pytest.raises(DataError, match=r"talks\.jsonl: row 3 .*nested too deeply"):
        tokenize(SftConfig(), load_chat("builtin:small"), [found])


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("f", {"x": [1, float("nan")]}, r"tool_calls\[0\]\.arguments: nan is not a JSON number"),
        ("f", '{"x": 1e999}', r"tool_calls\[0\]\.arguments: inf is not a JSON number"),
        ("f", '{"x": NaN}', r"tool_calls\[0\]\.arguments: nan is not a JSON number"),
        ("f", {"x": ["\ud800"]}, r"tool_calls\[0\]\.arguments: not valid Unicode"),
        ("f", {"\udfff": 1}, r"tool_calls\[0\]\.arguments: not valid Unicode"),
        ("f", "not JSON \ud800", r"tool_calls\[0\]\.arguments: not valid Unicode"),
        ("f", "{x: 1}", r"tool_calls\[0\]\.arguments: not a JSON object: '{x: 1}'"),
        ("f", "[1]", r"tool_calls\[0\]\.arguments: not a JSON object: '\[1\]'"),
        ("f\ud800", {}, r"tool_calls\[0\]\.name: not valid Unicode"),
    ],
)
def test_calls_that_cannot_be_written_name_their_row(name: str, arguments: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"talks\.jsonl: row 4 \(0-based\), field messages\[1\]\.{said}"):
        read_conversation(Path("talks.jsonl"), 4, calling(name, arguments))
    plain = read_conversation(Path("talks.jsonl"), 4, calling("suche", {"größe": [1.5, None, "😀"]}))
    assert plain.messages[1].tool_calls is not None


def test_a_fingerprint_covers_calls_tools_thoughts_order_and_split() -> None:
    thought = {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]}
    rows = [talk("a", "x"), calling("f", {"x": 1}), calling("f", {"x": 2}), {**calling("f", {"x": 1}), "tools": []}]
    rows += [{"messages": [{"role": "assistant", "content": "x"}]}, thought]
    a, one, two, same, plain, thinking = (read_conversation(Path(str(i)), i, row) for i, row in enumerate(rows))
    assert fingerprint([a, one], []) == fingerprint([a, same], [])
    cases = [([a, one], []), ([one, a], []), ([a], [one]), ([a, two], []), ([a, plain], []), ([a, thinking], [])]
    assert len({fingerprint(*case) for case in cases}) == len(cases)
