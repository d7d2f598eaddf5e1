"""The engine on a server: the model's tokens and log-probs, before and after its weights change."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import torch

from toolwise.config.schema import RunConfig
from toolwise.errors import ContextFullError
from toolwise.messages import Message
from toolwise.policies.local import LocalPolicy
from toolwise.policies.vllm.builder import build_vllm
from toolwise.policies.vllm.engine import VllmEngine
from toolwise.protocols import Sampling, TokenGenerator
from toolwise.remote.server_errors import ServerError

T = TypeVar("T")
QUESTIONS = ["What is 531 * 77?", "How many bridges does Alder have?", "Hello there"]


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


@pytest.fixture
def model(loaded: Any) -> Any:
    return copy.deepcopy(loaded[0])


@pytest.fixture
def engine(stand_in: Any, model: Any) -> Iterator[VllmEngine]:
    rollout = {"engine": "vllm", "vllm": {"base_url": stand_in.url}}
    made = build_vllm(RunConfig.model_validate({"rollout": rollout}), model, "unused")
    made.endpoint.backoff_s = 0.01
    stand_in.bodies.clear()
    yield made
    made.close()


def prompts(chat: Any) -> list[list[int]]:
    return [chat.start([Message(role="user", content=question)]) for question in QUESTIONS]


def greedy(chat: Any) -> Sampling:
    return Sampling(max_new_tokens=24, do_sample=False, stop_token_ids=(chat.end_id,))


async def both(engine: VllmEngine, here: LocalPolicy, chat: Any) -> list[tuple[Any, Any]]:
    asked = [(p, greedy(chat)) for p in prompts(chat)]
    theirs = await asyncio.gather(*(engine.generate(*a) for a in asked))
    ours = await asyncio.gather(*(here.generate(*a) for a in asked))
    return list(zip(theirs, ours, strict=True))


def test_it_generates_tokens(engine: VllmEngine, loaded: Any, model: Any) -> None:
    assert isinstance(engine, TokenGenerator)
    for one, other in run(both(engine, LocalPolicy(model, loaded[1], Sampling()), loaded[1])):
        assert list(one.token_ids) == list(other.token_ids)
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)
        assert (one.finish_reason, one.policy_version) == (other.finish_reason, 0)


def test_after_an_update_the_server_says_what_the_new_weights_say(
    engine: VllmEngine, stand_in: Any, loaded: Any, model: Any, teacher_forced: Any
) -> None:
    before = [list(one.token_ids) for one, _ in run(both(engine, LocalPolicy(model, loaded[1], Sampling()), loaded[1]))]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.weights_changed(4)
    after = run(both(engine, LocalPolicy(model, loaded[1], Sampling()), loaded[1]))
    for prompt, (one, other) in zip(prompts(loaded[1]), after, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert list(one.logprobs) == pytest.approx(teacher_forced(model, prompt, list(one.token_ids), 1.0), abs=1e-4)
        assert one.policy_version == 4
    assert [list(one.token_ids) for one, _ in after] != before
    assert stand_in.version == "4"
    assert engine.metrics()["policy/transfers"] == 2


def test_a_session_over_it_is_the_local_policys(engine: VllmEngine, loaded: Any, model: Any) -> None:
    sampling = Sampling(max_new_tokens=24, do_sample=False)
    remote = LocalPolicy(model, loaded[1], sampling, engine=engine)
    here = LocalPolicy(model, loaded[1], sampling)
    asked = [Message(role="user", content=QUESTIONS[0])]
    one, other = run(remote.get_action(asked)), run(here.get_action(asked))
    assert one[:2] == other[:2]
    assert one[2] is not None
    assert other[2] is not None
    assert list(one[2]["prompt_ids"]) == list(other[2]["prompt_ids"])
    assert list(one[2]["token_ids"]) == list(other[2]["token_ids"])
    assert remote.max_context == 4096
    assert remote.metrics()["policy/requests"] == 1


def test_a_seed_gives_the_same_draw(engine: VllmEngine, loaded: Any, stand_in: Any) -> None:
    prompt = prompts(loaded[1])[0]
    one, same, other = (run(engine.generate(prompt, Sampling(max_new_tokens=12, seed=s))) for s in (5, 5, 6))
    assert list(one.token_ids) == list(same.token_ids) != list(other.token_ids)
    assert [body["seed"] for body in stand_in.bodies] == [5, 5, 6]


def test_a_server_that_stumbles_is_asked_again(engine: VllmEngine, loaded: Any, stand_in: Any) -> None:
    stand_in.faults, stand_in.aborts = [503, 429], 1
    found = run(engine.generate(prompts(loaded[1])[0], greedy(loaded[1])))
    assert len(found.token_ids) > 0
    counts = engine.metrics()
    assert (counts["policy/requests"], counts["policy/retries"], counts["policy/failures"]) == (4, 3, 0)


def test_a_refusal_is_a_typed_fault(engine: VllmEngine, loaded: Any, stand_in: Any) -> None:
    stand_in.faults = [403]
    with pytest.raises(ServerError, match="HTTP 403: no"):
        run(engine.generate([1], greedy(loaded[1])))


def test_a_prompt_too_long_is_an_ending(engine: VllmEngine, loaded: Any) -> None:
    with pytest.raises(ContextFullError, match="4096"):
        run(engine.generate([1] * 4096, greedy(loaded[1])))


def test_closing_leaves_no_weights_behind(engine: VllmEngine) -> None:
    assert len(list(engine.weights.path.iterdir())) == 1
    engine.close()
    assert not engine.weights.path.exists()
