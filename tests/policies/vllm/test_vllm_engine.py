"""The engine on a server: the model's tokens and log-probs, before and after its weights change."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import torch

from toolwise.config.schema import RunConfig
from toolwise.errors import ContextFullError, PolicyError
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


Forced = Callable[[Any, list[int], list[int], float], list[float]]
Wait = Callable[[Callable[[], bool]], Coroutine[Any, Any, None]]


def add_noise(model: Any) -> None:
    """As much for any number of calls that a test makes, so that all of them sample."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.02)


async def reload_amid(
    engine: VllmEngine, stand_in: Any, prompt: list[int], sampling: Sampling, wait_until: Wait
) -> Any:
    """A reply during which the weights change to version 1."""
    reply = asyncio.ensure_future(engine.generate(prompt, sampling))
    await wait_until(lambda: stand_in.written >= 5)
    await engine.replace_weights(lambda: add_noise(engine.model), 1)
    return await reply


def test_a_reply_goes_on_across_a_reload_and_each_token_is_of_its_version(
    engine: VllmEngine, stand_in: Any, loaded: Any, model: Any, teacher_forced: Forced, wait_until: Wait
) -> None:
    old, prompt = copy.deepcopy(model), prompts(loaded[1])[0]
    stand_in.token_s = 0.01
    reply = run(reload_amid(engine, stand_in, prompt, Sampling(max_new_tokens=40, temperature=1.5, seed=3), wait_until))
    tokens, versions = list(reply.token_ids), list(reply.token_versions)
    first = versions.count(0)
    assert (len(tokens), reply.finish_reason, reply.policy_version) == (40, "length", 0)
    assert 0 < first < 40
    assert versions == [0] * first + [1] * (40 - first)
    of_old = teacher_forced(old, prompt, tokens, 1.5)
    of_new = teacher_forced(model, prompt, tokens, 1.5)
    assert list(reply.logprobs) == pytest.approx(of_old[:first] + of_new[first:], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(of_old, of_new, strict=True)) > 0.1
    asked = stand_in.bodies[:2]
    assert asked[1]["prompt"] == prompt + tokens[:first]
    assert asked[1]["max_tokens"] == 40 - first
    assert asked[0]["seed"] != asked[1]["seed"]  # else the same random numbers come again
    assert engine.metrics()["policy/retries"] == 0


def test_many_replies_go_on_across_many_reloads(
    engine: VllmEngine, stand_in: Any, loaded: Any, wait_until: Wait
) -> None:
    """Also those that wait for a slot, are on their way, or came while the server was paused."""
    engine.endpoint.max_concurrent = 6
    stand_in.token_s = 0.01

    async def go() -> list[Any]:
        prompt = prompts(loaded[1])[0]
        replies = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(max_new_tokens=30, seed=seed))) for seed in range(12)
        ]
        for version in range(1, 5):
            goal = stand_in.written + 40
            await wait_until(lambda goal=goal: stand_in.written >= goal or all(reply.done() for reply in replies))
            await engine.replace_weights(lambda: add_noise(engine.model), version)
        return await asyncio.gather(*replies)

    for reply in run(go()):
        versions = list(reply.token_versions or [reply.policy_version] * len(reply.token_ids))
        assert len(reply.token_ids) == len(reply.logprobs) == len(versions) == 30
        assert versions == sorted(versions)
    assert stand_in.interrupted > 0
    assert (stand_in.version, engine.version, engine.gate.inside) == ("4", 4, 0)


def test_a_reply_that_is_interrupted_just_when_it_ends_has_ended(
    engine: VllmEngine, stand_in: Any, loaded: Any, wait_until: Wait
) -> None:
    prompt = prompts(loaded[1])[0]
    whole = run(engine.generate(prompt, Sampling(max_new_tokens=8, seed=1)))
    stop = Sampling(max_new_tokens=8, seed=1, stop_token_ids=(whole.token_ids[-1],))
    for sampling in (Sampling(max_new_tokens=8, seed=1), stop):
        stand_in.aborts, engine.gate.closed = 1, False
        reply = asyncio.run(interrupted_at_end(engine, prompt, sampling, wait_until))
        assert list(reply.token_ids) == list(whole.token_ids)[: len(reply.token_ids)]
        assert reply.finish_reason == ("stop" if sampling is stop else "length")


async def interrupted_at_end(engine: VllmEngine, prompt: list[int], sampling: Sampling, wait_until: Wait) -> Any:
    """The gate closes while the request is under way, and the server says "abort"."""
    reply = asyncio.ensure_future(engine.generate(prompt, sampling))
    await wait_until(lambda: engine.gate.inside > 0)
    engine.gate.close()
    return await asyncio.wait_for(reply, 30)


def test_a_reply_with_stop_strings_ends_before_a_reload(
    engine: VllmEngine, stand_in: Any, loaded: Any, wait_until: Wait
) -> None:
    stand_in.token_s = 0.01
    sampling = Sampling(max_new_tokens=40, stop_strings=("</answer>",))
    reply = run(reload_amid(engine, stand_in, prompts(loaded[1])[0], sampling, wait_until))
    assert (len(reply.token_ids), reply.policy_version, reply.token_versions) == (40, 0, None)
    assert (stand_in.interrupted, engine.version) == (0, 1)


def test_after_a_failed_reload_nothing_is_sampled_until_one_succeeds(
    engine: VllmEngine, stand_in: Any, loaded: Any
) -> None:
    async def go() -> int:
        stand_in.refuses_weights = True
        with pytest.raises(PolicyError, match="shapes do not match"):
            await engine.replace_weights(lambda: None, 1)
        reply = asyncio.ensure_future(engine.generate(prompts(loaded[1])[0], Sampling(max_new_tokens=2)))
        await asyncio.sleep(0.1)
        assert not reply.done()
        stand_in.refuses_weights = False
        await engine.replace_weights(lambda: None, 2)
        return (await reply).policy_version

    assert run(go()) == 2


def test_a_reload_whose_caller_is_cancelled_ends_all_the_same(
    engine: VllmEngine, loaded: Any, wait_until: Wait
) -> None:
    async def go() -> int:
        reload = asyncio.ensure_future(engine.replace_weights(lambda: None, 1))
        await asyncio.sleep(0)
        reload.cancel()
        await wait_until(lambda: engine.version == 1)
        return (await engine.generate(prompts(loaded[1])[0], Sampling(max_new_tokens=2))).policy_version

    assert run(go()) == 1


def test_busy_seconds_are_those_with_a_request(engine: VllmEngine, stand_in: Any, loaded: Any) -> None:
    stand_in.token_s = 0.01
    before = engine.busy_s
    run(engine.generate(prompts(loaded[1])[0], Sampling(max_new_tokens=10)))
    spent = engine.busy_s - before
    assert spent >= 0.1
    assert engine.busy_s - before == spent


def test_closing_leaves_no_weights_behind(engine: VllmEngine) -> None:
    assert len(list(engine.weights.path.iterdir())) == 1
    engine.close()
    assert not engine.weights.path.exists()
