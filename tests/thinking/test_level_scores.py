"""The same action under four contexts: equal to a plain loop, exact for the level that was used, and None without a
score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
from precision import assert_fp32_close, fp32_bound
from reference_model import ReferenceModel
from selection import quick_first
from thinking_cases import REPLY, THOUGHTS, ScriptedThinker, entropies, read, small, teacher_forced, writer

from toolwise.config.schema import ActorConfig
from toolwise.learner.continuation_scores import ContinuationScorer
from toolwise.protocols import Generation, Sampling
from toolwise.thinking.alternatives import LeakError
from toolwise.thinking.level_scores import score_levels
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.thinking_model import PolicyWithScorer, ScoringRequest, TokenScores
from toolwise.types import Alternative

REPLIES = [
    REPLY,
    "<level>1</level><action>take the red key</action>",
    "<level>2</level><think>State: a very long hall with many doors</think><action>5</action>",
    "<level>4</level><think>Weigh: left</think><action>use map</action>",
]
WAYS = {
    "left": lambda model: ReferenceModel(model, "left"),
    "right": lambda model: ReferenceModel(model, "right"),
    "packed": lambda model: PolicyWithScorer(ScriptedThinker(), ContinuationScorer(model, ActorConfig())),
    "packed, nothing shared": lambda model: PolicyWithScorer(
        ScriptedThinker(), ContinuationScorer(model, ActorConfig(share_prefixes=False))
    ),
    "packed, in small parts": lambda model: PolicyWithScorer(
        ScriptedThinker(), ContinuationScorer(model, ActorConfig(micro_batch_tokens=64, logit_chunk_tokens=3))
    ),
}


def levels(steps: Sequence[ParsedStep], model: Any = None, temperature: float = 1.0, **more: Any) -> Any:
    alternatives = asyncio.run(writer(temperature=temperature).write(steps))
    model = model or ScriptedThinker()
    return asyncio.run(score_levels(model, small()[1], steps, alternatives, temperature=temperature, **more))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", quick_first([1.0, 0.7], [0.7]))
def test_scores_equal_an_unbatched_loop(way: str, temperature: float) -> None:
    model, chat = small()
    steps = [read(reply, index=i) for i, reply in enumerate(REPLIES)]
    found = levels(steps, WAYS[way](model), temperature, leak_nats=np.inf)
    for step, group in zip(steps, found.groups, strict=True):
        assert [score.level for score in group.scores] == [1, 2, 3, 4]
        for score in group.scores:
            head = step.token_ids[: len(step.spans.head)] if score.alternative is None else score.alternative.head_ids
            before = [*step.history, *head, *chat.encode("<action>")]
            wanted = teacher_forced(before, step.action_ids, temperature)
            assert_fp32_close(score.action_logprobs, wanted)
            wanted_entropies = entropies(before, step.action_ids, temperature)
            assert_fp32_close(score.action_entropies, wanted_entropies, scale=log(model.config.vocab_size))
            assert_fp32_close(score.action_logprob, np.mean(wanted))


def test_the_action_s_log_probs_under_the_used_level_are_the_sampled_ones() -> None:
    step = read()
    found = levels([step])
    drawn = step.logprobs[step.spans.action.start : step.spans.action.stop]
    assert_fp32_close(found.groups[0].used.action_logprobs, drawn)
    assert found.action_gap < fp32_bound(drawn).max()
    assert small()[1].decode(step.action_ids) == "go left"


@pytest.mark.parametrize(
    ("between", "tail"),
    [
        ("\n\n", "<action>go left"),
        ("\n", "<action> go left"),
        ("\n\n", "Answer: 4"),
        (" ", "<tool_call>{}</tool_call>"),
    ],
)
def test_text_before_the_action_is_in_all_contexts(between: str, tail: str) -> None:
    """Otherwise the used level would be compared with contexts that the policy never writes."""
    _, chat = small()
    asked: list[ScoringRequest] = []

    class Kept(ScriptedThinker):
        async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
            asked.extend(contexts)
            return await super().score(contexts, temperature)

    closing = "</action>" if tail.startswith("<action>") else ""
    replies = [
        f"<level>3</level><think>I look for the key</think>{between}{tail}{closing}",
        f"<level>1</level>{between}{tail}{closing}",
    ]
    found = levels([read(reply, index=i) for i, reply in enumerate(replies)], Kept(), leak_nats=np.inf)
    for context, group in zip(asked, found.groups, strict=True):
        texts = [chat.decode(ids) for ids in context.continuations]
        assert len(texts) == len(group.scores) == 4
        assert {text.partition("</think>")[2] or text.partition("</level>")[2] for text in texts} == {between + tail}
        assert len({score.action_logprobs.tobytes() for score in group.scores}) == 4


def test_all_contexts_of_all_steps_are_one_call() -> None:
    model = ScriptedThinker()
    levels([read(reply, index=i) for i, reply in enumerate(REPLIES)], model)
    assert model.scorings == 1


def test_the_opening_tag_is_context_and_not_scored() -> None:
    _, chat = small()
    for score in levels([read()]).groups[0].scores:
        assert chat.decode(score.context_ids) == "<action>"
        assert len(score.action_logprobs) == len(chat.encode("go left"))


def test_a_failed_alternative_shrinks_the_group_and_is_counted() -> None:
    step = read()
    [others] = asyncio.run(writer().write([step]))
    broken = [replace(others[0]), replace(others[1], failure="empty", head_ids=()), others[2]]
    found = asyncio.run(score_levels(ScriptedThinker(), small()[1], [step], [broken]))
    assert [score.level for score in found.groups[0].scores] == [1, 3, 4]
    assert found.failures == {"empty": 1}


def test_fewer_than_two_levels_are_no_group() -> None:
    step = read()
    failed = [Alternative(k, failure="unclosed") for k in (1, 2, 4)]
    model = ScriptedThinker()
    found = asyncio.run(score_levels(model, small()[1], [step], [failed]))
    assert (found.groups, found.failures, model.scorings) == ([None], {"unclosed": 3}, 0)


def test_a_score_that_is_no_number_leaves_the_group() -> None:
    class Nan(ScriptedThinker):
        async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
            [(own, first, *rest)] = await super().score(contexts, temperature)
            return [(own, TokenScores(np.full_like(first.logprobs, np.nan), first.entropies), *rest)]

    found = levels([read()], Nan())
    assert [score.level for score in found.groups[0].scores] == [2, 3, 4]
    assert found.failures == {"not_a_number": 1}


def test_a_leak_is_detected_by_the_thoughts_log_probs() -> None:
    steps = [read(reply, index=i) for i, reply in enumerate(REPLIES)]
    honest, peeking = ScriptedThinker(), ScriptedThinker(peek="The right action is go left. Say why.")
    for model in (honest, peeking):
        alternatives = asyncio.run(writer(model).write(steps))
        work = score_levels(model, small()[1], steps, alternatives)
        if model is honest:
            likely = [p for others in alternatives for other in others for p in other.logprobs]
            assert asyncio.run(work).thought_gap < fp32_bound(likely).max()
        else:
            with pytest.raises(LeakError, match="generated from something else"):
                asyncio.run(work)


def test_a_tag_that_shares_a_token_with_the_thought_is_re_tokenised() -> None:
    class Codec:
        """Characters as tokens, except for one token that spans the border."""

        stop_ids = (0,)
        glued = 500

        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, token_ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
            return "".join("><" if i == self.glued else chr(i) for i in token_ids)

    class Flat:
        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
            raise NotImplementedError

        async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
            asked.extend(contexts)
            return [
                tuple(TokenScores(np.zeros(len(c), np.float32), np.zeros(len(c), np.float32)) for c in k.continuations)
                for k in contexts
            ]

        def counters(self) -> dict[str, float]:
            return {}

    from toolwise.thinking.step_selection import parse_step
    from toolwise.types import StepData

    asked: list[ScoringRequest] = []
    codec = Codec()
    whole = "<level>2</level><think>a</think><action>go</action>"
    at = whole.index("><action")
    ids = [*codec.encode(whole[:at]), codec.glued, *codec.encode(whole[at + 2 :])]
    step = StepData(
        system_step_index=0,
        observation_data=None,
        action_taken={},
        resulting_messages_history=[],
        policy_logprobs={"prompt_ids": [1, 2], "token_ids": ids, "logprobs": [0.0] * len(ids)},
    )
    made = parse_step("r", "g", 0, step, codec)
    assert codec.decode(made.tail_ids) == "><action>go"
    other = Alternative(1, (), 16, codec.encode("<level>1</level>"), text="<level>1</level>")
    found = asyncio.run(score_levels(Flat(), codec, [made], [[other]]))
    assert codec.decode(asked[0].continuations[1]) == "<level>1</level><action>go"
    assert codec.decode(asked[0].continuations[0]) == "<level>2</level><think>a</think><action>go"
    assert len(found.groups[0].scores) == 2


def test_scores_do_not_depend_on_other_steps() -> None:
    """A group's scores do not depend on which other steps are scored with it."""
    together = levels([read(reply, index=i) for i, reply in enumerate(REPLIES)]).groups[0]
    alone = levels([read(REPLIES[0])]).groups[0]
    for a, b in zip(together.scores, alone.scores, strict=True):
        assert_fp32_close(a.action_logprobs, b.action_logprobs)


def test_the_scripted_thoughts_are_what_was_scored() -> None:
    group = levels([read()]).groups[0]
    thoughts = {score.level: score.alternative.thought for score in group.scores if score.alternative}
    assert thoughts == {1: None, **{k: THOUGHTS[k].removesuffix("</think>") for k in (2, 4)}}
