"""Models for the thinking stage: the engine, which computes each history once; a policy with a scorer."""

from __future__ import annotations

import asyncio

import pytest
from precision import assert_fp32_close
from thinking_cases import ScriptedThinker, history, small, teacher_forced

from toolwise.config.schema import ActorConfig
from toolwise.engine import Engine
from toolwise.learner.continuation_scores import ContinuationScorer
from toolwise.protocols import Sampling
from toolwise.thinking.thinking_model import (
    EngineModel,
    PolicyWithScorer,
    ScoringRequest,
)


def contexts() -> list[ScoringRequest]:
    _, chat = small()
    replies = [chat.encode(text) for text in ("<level>1</level><action>go", "<level>2</level><think>hm")]
    return [
        ScoringRequest(history(words), tuple(replies)) for words in ("You see a door.", "You see a key on the floor.")
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_pair_score_as_a_plain_loop_does(temperature: float) -> None:
    model, chat = small()
    engine = EngineModel(Engine(model, blocks=64, decode=chat.decode))
    pair = PolicyWithScorer(ScriptedThinker(), ContinuationScorer(model, ActorConfig()))
    for thinker in (engine, pair):
        found = asyncio.run(thinker.score(contexts(), temperature))
        for context, scores in zip(contexts(), found, strict=True):
            for ids, score in zip(context.continuations, scores, strict=True):
                wanted = teacher_forced(context.prefix_ids, ids, temperature)
                assert_fp32_close(score.logprobs, wanted)


def test_the_engine_prefills_each_history_once() -> None:
    model, chat = small()
    engine = Engine(model, blocks=256, decode=chat.decode)
    engine.batch_wait_s = 0.2  # until all requests are in
    thinker = EngineModel(engine, ("</think>",))
    before = history("You are in a hall with three doors and a table, and on the table lies a map of the house.")
    openings = [chat.encode(f"<level>{k}</level><think>") for k in (2, 3, 4)]

    async def write() -> None:
        sampling = Sampling(max_new_tokens=6)
        await asyncio.gather(*(thinker.generate([*before, *opening], sampling) for opening in openings))
        await thinker.score([ScoringRequest(before, tuple([*o, 5, 6, 7] for o in openings))], 1.0)

    asyncio.run(write())
    counted = thinker.counters()
    new = sum(len(opening) for opening in openings)
    # The history once, and no more than each context's own tokens besides (less where contexts share some).
    assert len(before) <= counted["prefilled_tokens"] <= len(before) + 2 * new + 9
    assert counted["reused_tokens"] >= 5 * (len(before) // 16) * 16
