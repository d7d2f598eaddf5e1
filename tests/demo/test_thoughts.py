"""Demonstrations of thinking levels with tool calls, and the questions that both can answer."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from toolwise.data import load_tasks
from toolwise.demo.reward import small_world_reward
from toolwise.demo.tasks import make_row
from toolwise.demo.thoughts import KINDS, added_up, conversations, drill, level_request, main, thought_parts
from toolwise.messages import Message
from toolwise.rollout.parsers import parse_auto
from toolwise.thinking.levels import DEFAULT_LEVELS
from toolwise.thinking.reply import parse_reply
from toolwise.tools.builtin.calculator import evaluate
from toolwise.training.route_policies import with_thinking


def test_sums_by_hand() -> None:
    assert added_up([7, 5, 9]) == ["7+5=2", "2+9=1"]
    messages = drill(Random(0))["messages"]
    digits = [int(digit) for digit in messages[0]["content"].split(" + ")]
    assert messages[1]["content"].endswith(f"={sum(digits) % 10}")


@pytest.mark.parametrize("seed", range(5))
def test_the_calculator_and_the_whole_thought_find_the_last_digit(seed: int) -> None:
    row = make_row("last_digit", Random(seed), 0, "train")
    answer = int(row["reward_model"]["ground_truth"])
    assert evaluate(row["extra_info"]["plan"][0][1]) == answer
    parts = thought_parts(row)
    assert parts["candidates"].endswith(f"={answer}.")
    assert f"={answer}." not in parts["reflection"] or len(parts["reflection"]) > 0


def test_replies_follow_the_format_of_levels_and_the_level_that_is_asked_for() -> None:
    asked = dict.fromkeys((level_request(level) for level in DEFAULT_LEVELS), 0)
    for row in conversations(200, seed=3):
        system, *_ = row["messages"]
        replies = [m for m in row["messages"] if m["role"] == "assistant"]
        if "<level>" not in replies[0]["content"]:
            assert not row["tools"]  # a drill
            continue
        for reply in replies:
            parsed = parse_reply(reply["content"] + ("x" if reply.get("tool_calls") else ""))
            assert parsed.valid, parsed.faults
        if system["role"] == "system":
            asked[system["content"]] += 1
            level = parse_reply(replies[0]["content"] + "x").level
            assert system["content"] == level_request(DEFAULT_LEVELS.by_number(level or 0))
    assert min(asked.values()) > 0


def test_it_asks_for_a_level_in_the_words_of_a_route() -> None:
    from toolwise.config.schema import RunConfig
    from toolwise.routing.routes import build_routes

    routes = [{"name": f"r{level.number}", "thinking": level.number} for level in DEFAULT_LEVELS]
    config = RunConfig.model_validate({"router": {"routes": routes}})
    noted = with_thinking(config, build_routes(config.router))
    assert [route.options.note for route in noted] == [level_request(level) for level in DEFAULT_LEVELS]


def test_answers_with_calls_are_right_and_the_text_is_not_mistaken_for_a_call() -> None:
    for row in conversations(60, seed=4):
        last = row["messages"][-1]
        if any(m.get("tool_calls") for m in row["messages"]):
            result = next(m["content"] for m in row["messages"] if m["role"] == "tool")
            assert last["content"].removeprefix("<level>1</level>Answer: ") in result
        assert parse_auto(last["content"])[1] == []


def test_the_reward_reads_the_answer_after_a_level() -> None:
    reply = Message(role="assistant", content="<level>2</level><think>State: 3 numbers.</think>Answer: 7")
    assert small_world_reward([reply], ground_truth="7").score == 1.0


def test_the_command_writes_what_sft_and_train_read(tmp_path: Path) -> None:
    main([str(tmp_path), "--count", "20", "--tasks", "40"])
    assert len((tmp_path / "teach.jsonl").read_text().splitlines()) == 20
    kinds = {task.extra_info["kind"] for task in load_tasks(tmp_path / "train.jsonl")}
    assert kinds == set(KINDS)
    assert len(load_tasks(tmp_path / "heldout.jsonl")) == 2
