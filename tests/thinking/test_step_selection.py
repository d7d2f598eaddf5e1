"""Which steps get alternatives, and that the token budget holds whatever is generated."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from thinking_cases import REPLY, THOUGHTS, ScriptedThinker, read, scored, small, step_data, writer

from toolwise.thinking.step_selection import choose_steps, parse_step, parse_steps, write_within_budget
from toolwise.thinking.thinking_model import NoLogprobsError

FORMLESS = "go left"


def names(steps: list) -> list[tuple[str, int]]:
    return sorted((step.rollout_id, step.index) for step in steps)


def test_steps_are_read_as_they_were_sampled() -> None:
    [step] = parse_steps([scored(1.0, step_kind="hard")], small()[1])
    assert (step.reply.level, step.reply.action, step.kind) == (3, "go left", "hard")
    assert step.thinking_tokens == len(small()[1].encode("I look for the key"))
    assert small()[1].decode(step.tail_ids) == "<action>go left"
    assert step.comparable


@pytest.mark.parametrize(
    "reply", [FORMLESS, "<level>7</level><action>go</action>", "<level>1</level><action></action>"]
)
def test_a_step_without_level_or_action_cannot_be_compared(reply: str) -> None:
    assert not read(reply).comparable


def test_a_policy_without_log_probs_is_rejected() -> None:
    step = step_data()
    step = step.model_copy(update={"policy_logprobs": {"content": "text", "prompt_ids": [1]}})
    with pytest.raises(NoLogprobsError, match="returned no token ids"):
        parse_step("r", "g", 0, step, small()[1])


def test_a_text_only_policy_is_rejected() -> None:
    mute = step_data().model_copy(update={"policy_logprobs": None})
    with pytest.raises(NoLogprobsError, match="text without log-probs"):
        parse_steps([replace(scored(1.0), steps=(mute, mute))], small()[1])
    assert parse_steps([], small()[1]) == []


def batch() -> tuple[list, list]:
    rollouts = [
        scored(1.0, [REPLY, REPLY], name="won", group="mixed"),
        scored(0.0, [REPLY], name="lost", group="mixed"),
        scored(1.0, [REPLY], name="same", group="equal"),
        scored(1.0, [FORMLESS], name="formless", group="equal"),
    ]
    return parse_steps(rollouts, small()[1]), rollouts


def test_all_mixed_and_successful() -> None:
    steps, rollouts = batch()
    assert names(choose_steps(steps, rollouts)) == [("lost", 0), ("same", 0), ("won", 0), ("won", 1)]
    assert names(choose_steps(steps, rollouts, selection="mixed")) == [("lost", 0), ("won", 0), ("won", 1)]
    assert names(choose_steps(steps, rollouts, selection="successful")) == [("won", 0), ("won", 1)]
    by_score = choose_steps(steps, rollouts, selection="successful", success_score=1.0)
    assert names(by_score) == [("same", 0), ("won", 0), ("won", 1)]


def test_a_random_share_is_reproducible() -> None:
    steps, rollouts = batch()
    first = choose_steps(steps, rollouts, share=0.5, seed="a")
    assert len(first) == 2
    assert names(first) == names(choose_steps(steps, rollouts, share=0.5, seed="a"))
    assert len({tuple(names(choose_steps(steps, rollouts, share=0.5, seed=str(i)))) for i in range(20)}) > 1


@pytest.mark.parametrize("most", [0, 50, 100, 200, 10_000])
def test_no_more_is_generated_than_allowed(most: int) -> None:
    steps = [read(index=i) for i in range(6)]
    endless = dict.fromkeys(THOUGHTS, "no end " * 40)
    for words in (THOUGHTS, endless):
        done, written = asyncio.run(write_within_budget(writer(ScriptedThinker(words)), steps, most))
        spent = sum(other.generated_tokens for others in written for other in others)
        assert spent <= most
        assert len(done) == len(written)
    assert len(done) == min(6, most // 80)  # two thoughts of at most 40 tokens each, all used up


def test_unspent_tokens_go_to_the_next_wave() -> None:
    steps = [read(index=i) for i in range(6)]
    done, _ = asyncio.run(write_within_budget(writer(), steps, 170))
    assert len(done) > 170 // 80


def test_without_a_limit_all_are_generated_at_once() -> None:
    steps = [read(index=i) for i in range(3)]
    done, written = asyncio.run(write_within_budget(writer(), steps, None))
    assert (done, [len(others) for others in written]) == (steps, [3, 3, 3])


def test_it_warns_if_not_a_single_step_fits(caplog: pytest.LogCaptureFixture) -> None:
    done, _ = asyncio.run(write_within_budget(writer(), [read()], 79))
    assert done == []
    assert "one step may take 80 tokens but max_added_tokens allows 79" in caplog.text
