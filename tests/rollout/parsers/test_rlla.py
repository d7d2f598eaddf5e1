"""RLLA's calls: one block, one object per line."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.messages import Message, ToolCall
from toolwise.rewards.library.rlla import read_calls, required_tags, to_rlla_text
from toolwise.rollout.parsers import parse_rlla, render_rlla

DATA = Path(__file__).parents[2] / "fixtures" / "rlla_test.parquet"


def block(*lines: str) -> str:
    return "\n".join(["<tool_call>", *lines, "</tool_call>"])


def named(name: str) -> str:
    return f'{{"name": "{name}", "parameters": {{"q": "</tool_call>"}}}}'


def outline(text: str) -> list[str]:
    """Names of the parsed calls, text of those that could not be parsed."""
    return [call.name or str(call.arguments) for call in parse_rlla(text)[1]]


def test_a_call_a_line() -> None:
    thought = "<think>Both <tool_call> at once.</think>"
    assert parse_rlla(f"{thought}\n{block(named('f'), named('g'))}\n<response>Soon.</response>") == (
        f"{thought}<response>Soon.</response>",
        [
            ToolCall(id="call_0", name="f", arguments={"q": "</tool_call>"}),
            ToolCall(id="call_1", name="g", arguments={"q": "</tool_call>"}),
        ],
    )


def test_gold_answers_are_read_as_the_reward_reads_them() -> None:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(DATA).to_pylist()
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    calling = [gold for gold in golds if "tool_call" in required_tags(gold)]
    assert len(calling) > 60
    for gold in golds:
        content, calls = parse_rlla(gold)
        wanted = read_calls(gold) if gold in calling else []
        assert [{"name": c.name, "parameters": c.arguments} for c in calls] == wanted
        assert "<tool_call>" not in content.partition("</think>")[2]
        message = Message(role="assistant", content=content, tool_calls=calls or None)
        assert (read_calls(to_rlla_text(message)) if calls else []) == wanted


def test_a_bad_line_spoils_no_other() -> None:
    text = block(named("f"), "oops", '{"name": "g", "parameters": {', named("h"), '{"a": 1}')
    assert outline(text) == ["f", "oops", '{"name": "g", "parameters": {', "h", '{"a": 1}']


@pytest.mark.parametrize("line", [f"{named('f')},", f"{named('f')} {named('g')}", f"- {named('f')}"])
def test_a_line_that_is_not_just_an_object_is_a_bad_one(line: str) -> None:
    content, calls = parse_rlla(block(line.replace("</tool_call>", "x"), named("h")))
    assert content == ""
    assert [c.name for c in calls] == ["", "h"]
    assert calls[0].arguments == line.replace("</tool_call>", "x")


def test_a_single_call_may_run_over_lines() -> None:
    assert outline(block('{"name": "f",', ' "parameters": {', "}}")) == ["f"]


def test_one_of_several_calls_may_not() -> None:
    """So an incomplete line cannot swallow the next one."""
    lines = ['{"name": "f", "parameters": {"a":', named("g"), "}}"]
    assert outline(block(named("e"), *lines)) == ["e", lines[0], "g", lines[2]]


@pytest.mark.parametrize("between", ["\n", "\n\n", " \r\n\t "])
def test_blank_lines_are_no_calls(between: str) -> None:
    assert outline(f"<tool_call>{between}{named('f')}{between}{named('g')}{between}</tool_call>") == ["f", "g"]


def test_other_line_separators_may_stand_inside_strings() -> None:
    line = '{"name": "f", "parameters": {"a": "x\u2028y\x85z"}}'
    assert [c.arguments for c in parse_rlla(block(line, line))[1]] == [{"a": "x\u2028y\x85z"}] * 2


def test_a_code_fence_inside_the_block_is_passed_over() -> None:
    assert outline(block("```json", named("f"), named("g"), "```")) == ["f", "g"]


@pytest.mark.parametrize("end", ["", "\n", "\n</tool_", "</tool_call"])
def test_whole_lines_before_a_cut_are_read(end: str) -> None:
    assert outline(f"<tool_call>\n{named('f')}\n{named('g')}{end}") == ["f", "g"]


def test_a_line_that_was_cut_off_is_kept() -> None:
    assert outline(f'<tool_call>\n{named("f")}\n{{"name": "g", "para') == ["f", '{"name": "g", "para']


@pytest.mark.parametrize("text", [block(), "<tool_call></tool_call>", "<tool_call>", "<tool_call>\n</tool"])
def test_an_empty_block_is_one_bad_call(text: str) -> None:
    assert parse_rlla(text) == ("", [ToolCall(id="call_0", name="", arguments="")])


def test_hermes_blocks_are_read_too() -> None:
    assert outline(f"{block(named('f'))} and {block(named('g'))}") == ["f", "g"]
    assert outline('<tool_call>{"name": "f", "arguments": {}}</tool_call>') == ["f"]


def test_rendering_writes_one_block() -> None:
    calls = [ToolCall(name="f", arguments={"q": "é"}), ToolCall(name="", arguments="as {it was")]
    assert render_rlla("Well:", calls) == "Well:\n" + block('{"name": "f", "parameters": {"q": "é"}}', "as {it was")
