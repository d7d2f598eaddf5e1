"""Alternative thoughts: level forced, cut before the action, never shown it; failures carry a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from thinking_cases import REPLY, THOUGHTS, ScriptedThinker, history, read, small, writer

from toolwise.errors import ContextFullError, PolicyError
from toolwise.protocols import Generation, Sampling
from toolwise.thinking.alternatives import mentions_action
from toolwise.thinking.levels import DEFAULT_LEVELS


def write(model: ScriptedThinker, reply: str = REPLY, **sampling: object) -> dict[int, object]:
    [found] = asyncio.run(writer(model, **sampling).write([read(reply)]))
    return {other.level: other for other in found}


def test_the_other_three_levels_are_written_each_from_the_history_and_its_level() -> None:
    model, (_, chat) = ScriptedThinker(), small()
    found = write(model)
    assert sorted(found) == [1, 2, 4]
    assert model.asked == [[*history(), *chat.encode(DEFAULT_LEVELS.by_number(k).opening)] for k in (2, 4)]


def test_the_prompt_of_an_alternative_never_contains_the_action() -> None:
    model = ScriptedThinker()
    write(model)
    assert all("go left" not in small()[1].decode(ids) for ids in model.asked)


def test_a_thought_is_cut_if_generation_continues_into_the_action() -> None:
    _, chat = small()
    found = write(ScriptedThinker({**THOUGHTS, 2: "State: a hall</think><action>go right</action>"}))
    assert found[2].text == "<level>2</level><think>State: a hall</think>"
    assert chat.decode(found[2].head_ids) == found[2].text
    assert len(found[2].sampled_ids) == len(found[2].logprobs)
    assert found[2].thought == "State: a hall"


def test_a_thought_that_ends_in_one_token_stops_there() -> None:
    found = write(ScriptedThinker({**THOUGHTS, 2: "State: a hall</think><action>go right</action>"}))
    assert found[2].generated_tokens == len(small()[1].encode("State: a hall</think>"))


def test_level_one_has_no_thought_and_costs_nothing() -> None:
    model = ScriptedThinker()
    found = write(model)
    assert (found[1].text, found[1].generated_tokens, found[1].thinking_tokens) == ("<level>1</level>", 0, 0)
    assert len(model.asked) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("State: a hall and no end", "too_long"),
        ("</think>", "empty"),
        ("   </think>", "empty"),
        ("State <level>2</level> again</think>", "malformed"),
        ("State <action>go left</action></think>", "malformed"),
    ],
)
def test_failed_thoughts_have_a_reason_and_no_tokens(words: str, why: str) -> None:
    found = write(ScriptedThinker({**THOUGHTS, 2: words}), max_new_tokens=12)
    assert found[2].failure == why
    assert list(found[2].head_ids) == []
    assert found[4].failure is None


def test_a_reply_that_ends_without_closing_its_thought_is_unclosed() -> None:
    class Ender(ScriptedThinker):
        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
            return Generation([*small()[1].encode("hm"), small()[1].end_id], [-1.0] * 3, "stop", 0)

    assert write(Ender())[2].failure == "unclosed"


@pytest.mark.parametrize(("fault", "why"), [(ContextFullError("full"), "context_full"), (PolicyError("no"), "fault")])
def test_a_failing_generation_is_recorded_and_does_not_raise(fault: Exception, why: str) -> None:
    class Broken(ScriptedThinker):
        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
            raise fault

    found = write(Broken())
    assert {found[k].failure for k in (2, 4)} == {why}
    assert found[1].failure is None


def test_the_prompt_is_the_history_and_the_level_and_nothing_else() -> None:
    _, chat = small()
    step = read()
    opening = chat.encode("<level>2</level><think>")
    [[_, alternative, _]] = asyncio.run(writer().write([step]))
    assert alternative.prompt_ids == [*step.history, *opening]


def test_each_alternative_has_its_own_reproducible_seed() -> None:
    class Seeds(ScriptedThinker):
        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
            seeds.append(sampling.seed)
            return await super().generate(token_ids, sampling)

    seeds: list[int] = []
    steps = [read(index=0), read(index=1)]
    asyncio.run(writer(Seeds()).write(steps))
    asyncio.run(writer(Seeds()).write(steps))
    asyncio.run(writer(Seeds()).write(steps, training_step=1))
    assert len(set(seeds[:4])) == 4
    assert seeds[:4] == seeds[4:8]
    assert not set(seeds[:4]) & set(seeds[8:])


@pytest.mark.parametrize(
    ("thought", "action", "named"),
    [
        ("I will Go  LEFT now", "go left", True),
        ("I will go", "go left", False),
        ("I will go lefthanded", "go left", False),
        ("the answer is 35", "5", False),
        ("the answer is 5.", "5", True),
        ("我应该打开门然后", "打开门", True),
        (None, "go left", False),
        ("anything", None, False),
        ("anything", "", False),
    ],
)
def test_whether_a_thought_names_the_action(thought: str | None, action: str | None, named: bool) -> None:
    assert mentions_action(thought, action) is named


def test_the_end_of_a_thought_is_found_as_by_parse_reply() -> None:
    shouted = ScriptedThinker(dict.fromkeys(THOUGHTS, "State: a hall</THINK><action>go left"))
    [others] = asyncio.run(writer(shouted).write([read()]))
    for other in others:
        assert other.failure is None
        assert "go left" not in other.text
