"""The reply parser on valid replies, on every kind of format fault, and on arbitrary text."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolwise.rollout.parsers.action import parse_action
from toolwise.thinking.reply import FormatFault, parse_reply

L2 = "<level>2</level>"
GOOD = L2 + "<think>the door is open</think><action>go left</action>"


@pytest.mark.parametrize(
    ("text", "level", "thought", "action", "kind"),
    [
        (GOOD, 2, "the door is open", "go left", "action"),
        ("<level>1</level><action>go left</action>", 1, None, "go left", "action"),
        (" <level> 3 </level>\n<think>\nhm\n</think>\n<action> go </action>\n", 3, "hm", "go", "action"),
        ("<LEVEL>4</LEVEL><Think>a</Think><ACTION>b</ACTION>", 4, "a", "b", "action"),
        ("<level>2</level><think>Tür 🚪 offen</think><action>geh 左</action>", 2, "Tür 🚪 offen", "geh 左", "action"),
        (L2 + "<think>1 < 2 and <b>bold</b></think><action>x</action>", 2, "1 < 2 and <b>bold</b>", "x", "action"),
        (
            '<level>2</level><think>look it up</think><tool_call>{"name": "f"}</tool_call>',
            2,
            "look it up",
            '<tool_call>{"name": "f"}</tool_call>',
            "tool_call",
        ),
        (
            "<level>1</level>\n<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>",
            1,
            None,
            "<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>",
            "tool_call",
        ),
        ("<level>1</level>[TOOL_CALLS][]", 1, None, "[TOOL_CALLS][]", "tool_call"),
        ('<level>1</level>[TOOL_CALLS]["<tool_call>"]', 1, None, '[TOOL_CALLS]["<tool_call>"]', "tool_call"),
        ("<level>3</level><think>6 · 7</think>\n\nAnswer: 42", 3, "6 · 7", "Answer: 42", "answer"),
        ("<level>1</level>42", 1, None, "42", "answer"),
    ],
)  # fmt: skip
def test_valid_replies(text: str, level: int, thought: str | None, action: str, kind: str) -> None:
    reading = parse_reply(text)
    assert (reading.level, reading.thought, reading.action, reading.kind) == (level, thought, action, kind)
    assert reading.valid
    assert reading.faults == ()


@pytest.mark.parametrize(
    ("text", "faults", "level", "thought", "action"),
    [
        ("", "no_level no_thought no_action", None, None, None),
        ("go left", "no_level no_thought", None, None, "go left"),
        ("<think>a</think><action>b</action>", "no_level", None, "a", "b"),
        ("<level>2<think>a</think><action>b</action>", "unclosed_level", 2, "a", "b"),
        (L2 + "<level>3</level><think>a</think><action>b</action>", "repeated_level stray_text", 2, "a", "b"),
        ("<level>5</level><think>a</think><action>b</action>", "bad_level", None, "a", "b"),
        ("<level>0</level><action>b</action>", "bad_level no_thought", None, None, "b"),
        ("<level>-1</level><think>a</think><action>b</action>", "bad_level", None, "a", "b"),
        ("<level>٢</level><think>a</think><action>b</action>", "bad_level", None, "a", "b"),
        ("<level>two</level><think>a</think><action>b</action>", "bad_level", None, "a", "b"),
        ("<level></level><think>a</think><action>b</action>", "bad_level", None, "a", "b"),
        ("<think>a</think><level>2</level><action>b</action>", "late_level", 2, "a", "b"),
        (L2 + "<action>b</action>", "no_thought", 2, None, "b"),
        (L2 + "<think> </think><action>b</action>", "empty_thought", 2, "", "b"),
        ("<level>1</level><think>a</think><action>b</action>", "needless_thought", 1, "a", "b"),
        (L2 + "<think>a</think><think>c</think><action>b</action>", "repeated_thought stray_text", 2, "a", "b"),
        (L2 + "<think>a<action>b</action>", "unclosed_thought", 2, "a", "b"),
        (L2 + "<think>a", "unclosed_thought no_action", 2, "a", None),
        (L2 + "a</think><action>b</action>", "unopened_thought", 2, "a", "b"),
        (L2 + "<think>a<think>c</think>d</think><action>b</action>", "nested_tag stray_text", 2, "a<think>c", "b"),
        (L2 + "<think>a <level>3</level></think><action>b</action>", "nested_tag", 2, "a <level>3</level>", "b"),
        (L2 + "<think>a <action>c</action></think><action>b</action>", "nested_tag", 2, "a <action>c</action>", "b"),
        (L2 + "<action>b</action><think>a</think>", "action_first", 2, "a", "b"),
        (L2 + "<think>a</think>", "no_action", 2, "a", None),
        (L2 + "<think>a</think><action> </action>", "empty_action", 2, "a", ""),
        (L2 + "<think>a</think><action>c</action><action>b</action>", "repeated_action stray_text", 2, "a", "b"),
        (L2 + "<think>a</think><action>b", "unclosed_action", 2, "a", "b"),
        (L2 + "<think>a</think><action>b</action> and more", "stray_text", 2, "a", "b"),
        ("so: <level>2</level><think>a</think><action>b</action>", "stray_text", 2, "a", "b"),
        (L2 + "<think>a</think> so <action>b</action>", "stray_text", 2, "a", "b"),
        (L2 + '<think>a</think><tool_call>{"na', "unclosed_action", 2, "a", '<tool_call>{"na'),
    ],
)  # fmt: skip
def test_faults_are_listed_and_the_rest_is_parsed(
    text: str, faults: str, level: int | None, thought: str | None, action: str | None
) -> None:
    reading = parse_reply(text)
    assert " ".join(reading.faults) == faults
    assert (reading.level, reading.thought, reading.action) == (level, thought, action)
    assert not reading.valid


def test_spans_cut_the_text_into_its_parts() -> None:
    spans = parse_reply(GOOD).spans
    level, thought, action = (GOOD[slice(*span)] for span in (spans.level, spans.thought, spans.action) if span)
    assert (level, thought, action) == ("2", "the door is open", "go left")
    assert GOOD[slice(*spans.head)] == "<level>2</level><think>the door is open</think>"


def test_a_tool_call_is_scored_with_its_tags_an_action_without() -> None:
    text = '<level>1</level>\n<tool_call>{"name": "f"}</tool_call>'
    spans = parse_reply(text).spans
    assert spans.action is not None
    assert text[slice(*spans.action)] == '<tool_call>{"name": "f"}</tool_call>'
    assert text[: spans.head[1]] == "<level>1</level>"


@pytest.mark.parametrize("action", ["<action> go </action>", "Answer: 42", "<tool_call>{}</tool_call>"])
def test_white_space_before_the_action_is_not_part_of_the_head(action: str) -> None:
    for head in ("<level>2</level> <think>a</think>", "<level>1</level>"):
        assert parse_reply(f"{head}\n\n{action}").spans.head == (0, len(head))


tags = st.sampled_from(
    [
        "<level>",
        "</level>",
        "<think>",
        "</think>",
        "<action>",
        "</action>",
        "<tool_call>",
        "</tool_call>",
        "1",
        "2",
        "9",
    ]
)
scraps = st.lists(st.one_of(tags, st.text(max_size=4)), max_size=14).map("".join)


@given(scraps)
@example("<think></think")
@example("</action><action></level>")
def test_any_text_can_be_read(text: str) -> None:
    reading = parse_reply(text)
    for span in (reading.spans.level, reading.spans.thought, reading.spans.action, reading.spans.head):
        assert span is None or 0 <= span[0] <= span[1] <= len(text)
    assert reading.level in (None, 1, 2, 3, 4)
    assert (reading.kind is None) == (reading.action is None) == (reading.spans.action is None)
    assert list(reading.faults) == [fault for fault in FormatFault if fault in reading.faults]
    if reading.spans.action and FormatFault.ACTION_FIRST not in reading.faults:
        assert reading.spans.head[1] <= reading.spans.action[0]


@given(scraps)
def test_a_valid_reply_has_all_its_parts(text: str) -> None:
    reading = parse_reply(text)
    if reading.valid:
        assert reading.level is not None
        assert reading.action
        assert bool(reading.thought) == (reading.level > 1)


@given(st.lists(st.one_of(tags.filter(lambda tag: "tool" not in tag), st.text(max_size=4)), max_size=14).map("".join))
def test_the_environment_receives_the_action_that_is_scored(text: str) -> None:
    reading = parse_reply(text)
    if reading.valid and reading.kind == "action":
        assert parse_action(text)[0] == (reading.action or "").encode("utf-8", "replace").decode()


def test_a_long_text_is_read_in_linear_time() -> None:
    text = "<think><action>" * 40_000 + "<level>" * 40_000
    began = time.process_time()
    reading = parse_reply(text)
    assert time.process_time() - began < 5.0
    assert FormatFault.UNCLOSED_THOUGHT in reading.faults
