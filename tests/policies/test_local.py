"""The in-process policy: few batches for many requests, every request answered, and token buffers that only grow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
from engine_cases import before_forward

from toolwise.errors import ConfigError, ContextFullError, PolicyError
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.policies.transformers_generation import BatchGenerator, StockForward, check_cache
from toolwise.protocols import AgentPolicy, Generation, Sampling, SessionPolicy, TokenGenerator

torch.set_num_threads(1)
T = TypeVar("T")
QUESTION = [Message(role="user", content="What is 2 + 2?")]
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {"properties": {}}}}]


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


ENGINES: list[Any] = ["toolwise", "transformers"]


def local(max_new_tokens: int = 6, *, max_batch: int = 256, engine: Any = "toolwise", **sampling: Any) -> LocalPolicy:
    model, chat = loaded()
    drawn = Sampling(max_new_tokens=max_new_tokens, **sampling)
    return LocalPolicy(model, chat, drawn, max_batch=max_batch, engine=engine)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(limited())


def prompt(i: int = 0) -> list[int]:
    ids: list[int] = loaded()[1].start([Message(role="user", content=f"What is {i} + 2?")])
    return ids


def watched(look: Any) -> AbstractContextManager[None]:
    return before_forward(loaded()[0], look)


@contextmanager
def prefills_seen() -> Iterator[list[int]]:
    """Number of rows of each prefill pass."""
    check_cache(StockForward(loaded()[0]))  # once per model: before its first batch
    rows: list[int] = []

    def look(ids: Any) -> None:
        if ids.shape[1] > 1:
            rows.append(ids.shape[0])

    with watched(look):
        yield rows


def test_it_is_every_kind_of_policy() -> None:
    policy = local()
    assert isinstance(policy, TokenGenerator)
    assert isinstance(policy, AgentPolicy)
    assert isinstance(policy, SessionPolicy)


async def ask_many(policy: LocalPolicy, count: int, new: int) -> list[Generation]:
    return await asyncio.gather(
        *(policy.generate(prompt(i), Sampling(max_new_tokens=new, seed=i)) for i in range(count))
    )


def waits_longer(policy: LocalPolicy) -> LocalPolicy:
    """On a busy machine the thread that makes requests may stand still for longer than a batch usually waits."""
    assert isinstance(policy.engine, BatchGenerator)
    policy.engine.batch_wait_s = 0.1
    return policy


def test_requests_made_together_are_one_batch() -> None:
    with prefills_seen() as rows:
        results = run(ask_many(waits_longer(local(engine="transformers")), 40, 2))
    assert rows == [40]
    assert all(len(r.token_ids) == 2 for r in results)


def test_requests_made_together_run_together_in_the_engine() -> None:
    policy = local()
    results = run(ask_many(policy, 40, 2))
    assert policy.metrics()["engine/steps"] <= 4
    assert all(len(r.token_ids) == 2 for r in results)


async def ask_late(policy: LocalPolicy) -> None:
    async def late(i: int) -> Generation:
        for _ in range(i % 7):
            await asyncio.sleep(0)
        return await policy.generate(prompt(i), Sampling(max_new_tokens=2))

    await asyncio.gather(*map(late, range(40)))


def test_requests_that_come_while_others_do_are_gathered_too() -> None:
    with prefills_seen() as rows:
        run(ask_late(waits_longer(local(engine="transformers"))))
    assert len(rows) <= 2
    assert sum(rows) == 40


def test_the_engine_takes_in_whoever_comes_while_it_works() -> None:
    policy = local()
    run(ask_late(policy))
    assert policy.metrics()["engine/steps"] < 20


def test_no_batch_is_larger_than_allowed_and_everyone_is_served() -> None:
    with prefills_seen() as rows:
        results = run(ask_many(local(max_batch=16, engine="transformers"), 40, 1))
    assert max(rows) == 16
    assert sum(rows) == len(results) == 40
    assert len(rows) <= 4  # the first batch may start before the other requests arrive


def test_no_more_run_in_the_engine_than_allowed_and_everyone_is_served() -> None:
    policy = local(max_batch=16)
    running: list[int] = []
    with watched(lambda ids: running.append(len(policy.engine.scheduler.running))):  # type: ignore[union-attr]
        results = run(ask_many(policy, 40, 3))
    assert max(running) == 16
    assert len(results) == 40


@pytest.mark.parametrize("engine", ENGINES)
def test_everyone_gets_their_own_answer(engine: str) -> None:
    samplings = [Sampling(max_new_tokens=4, seed=i, temperature=3.0) for i in range(12)]

    async def ask(policy: LocalPolicy) -> list[Generation]:
        work = (policy.generate(prompt(i % 3), sampling) for i, sampling in enumerate(samplings))
        return await asyncio.gather(*work)

    async def one(policy: LocalPolicy, i: int) -> Generation:
        return await policy.generate(prompt(i % 3), samplings[i])

    together = run(ask(local(engine=engine)))
    for i, result in enumerate(together):
        assert list(run(one(local(engine=engine), i)).token_ids) == list(result.token_ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failing_model_is_told_to_every_requester_and_the_policy_recovers(engine: str) -> None:
    policy = local(engine=engine)

    def fail(ids: Any) -> None:
        raise RuntimeError("out of memory")

    async def ask(n: int) -> list[Any]:
        work = (policy.generate(prompt(i), Sampling(max_new_tokens=2)) for i in range(n))
        return await asyncio.gather(*work, return_exceptions=True)

    async def both() -> tuple[list[Any], list[Any]]:
        with watched(fail):
            failed = await ask(5)
        return failed, await ask(3)

    failed, well = run(both())
    assert [str(f) for f in failed] == ["generation failed: RuntimeError: out of memory"] * 5
    assert all(isinstance(f, PolicyError) for f in failed)
    assert all(isinstance(w, Generation) for w in well)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_who_leaves_does_not_hurt_those_who_wait(engine: str) -> None:
    async def ask(policy: LocalPolicy) -> list[Any]:
        tasks = [asyncio.create_task(policy.generate(prompt(i), Sampling(max_new_tokens=2))) for i in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(ask(local(engine=engine)))
    assert isinstance(results[2], asyncio.CancelledError)
    assert all(isinstance(r, Generation) for i, r in enumerate(results) if i != 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_who_leaves_while_the_model_works_does_not_hurt_the_others(engine: str) -> None:
    working = threading.Event()

    def look(ids: Any) -> None:
        working.set()

    async def ask(policy: LocalPolicy) -> list[Any]:
        tasks = [asyncio.create_task(policy.generate(prompt(i), Sampling(max_new_tokens=30))) for i in range(3)]
        await asyncio.to_thread(working.wait, 20)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with watched(look):
        results = run(ask(local(engine=engine)))
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(r, Generation) for r in results[1:])


def test_a_whole_batch_that_leaves_does_not_strand_those_behind_it() -> None:
    async def ask(policy: LocalPolicy) -> list[Any]:
        tasks = [asyncio.create_task(policy.generate(prompt(i), Sampling(max_new_tokens=1))) for i in range(5)]
        await asyncio.sleep(0)
        for task in tasks[:3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(ask(local(max_batch=3)))
    assert all(isinstance(r, Generation) for r in results[3:])


@pytest.mark.parametrize("engine", ENGINES)
def test_tools_that_hang_in_the_loops_threads_do_not_stop_the_model(engine: str) -> None:
    free = threading.Event()

    async def ask(policy: LocalPolicy) -> Generation:
        hung = [asyncio.create_task(asyncio.to_thread(free.wait, 20)) for _ in range(64)]
        try:
            await asyncio.sleep(0.05)
            return await asyncio.wait_for(policy.generate(prompt(), Sampling(max_new_tokens=2)), 5)
        finally:
            free.set()
            await asyncio.gather(*hung)

    assert len(run(ask(local(engine=engine))).token_ids) == 2


def test_one_policy_serves_one_event_loop_after_another() -> None:
    policy = local()
    for _ in range(2):
        assert len(run(policy.generate(prompt(), Sampling(max_new_tokens=2))).token_ids) == 2


@pytest.mark.parametrize(
    ("ids", "sampling", "words"),
    [
        ([], Sampling(), "the prompt is empty"),
        ([1, 10**6], Sampling(), "outside the model's vocabulary of 2048"),
        ([-1], Sampling(), "outside the model's vocabulary of 2048"),
        ([1], Sampling(max_new_tokens=0), "max_new_tokens must be at least 1"),
        ([1], Sampling(temperature=0.0), "temperature above 0"),
    ],
)
def test_what_would_bring_down_a_batch_is_refused_alone(ids: Any, sampling: Sampling, words: str) -> None:
    async def ask(policy: LocalPolicy) -> list[Any]:
        good = policy.generate(prompt(), Sampling(max_new_tokens=2))
        return list(await asyncio.gather(good, policy.generate(ids, sampling), return_exceptions=True))

    good, bad = run(ask(local()))
    assert isinstance(good, Generation)
    assert isinstance(bad, PolicyError)
    assert words in str(bad)


def test_a_conversation_that_outgrows_the_context_is_told_apart() -> None:
    with pytest.raises(ContextFullError, match=r"do not fit the model's context of 4096.*rollout.max_new_tokens"):
        run(local().generate([1] * 4090, Sampling(max_new_tokens=7)))


def test_results_name_the_version_of_the_weights() -> None:
    policy = local()
    policy.version = 12
    _, _, logprobs, _ = run(policy.get_action(QUESTION))
    assert logprobs is not None
    assert logprobs["policy_version"] == 12
    assert policy.metrics()["policy/version"] == 12.0


def test_a_turn_ends_with_the_chats_end_token() -> None:
    policy = local(200, temperature=0.2)
    _, raw, logprobs, _ = run(policy.session(seed=1, do_sample=True).get_action(QUESTION))
    assert logprobs is not None
    ids = list(logprobs["token_ids"])
    if logprobs["finish_reason"] != "length":
        assert ids[-1] == policy.chat.end_id
    assert policy.chat.end_id not in ids[:-1]
    assert raw == policy.chat.decode(ids)


def play(policy: LocalPolicy, turns: Sequence[Sequence[Message]], seed: int = 1, **more: Any) -> list[dict[str, Any]]:
    """An episode with these user turns; returns the tokens of each step."""

    async def episode() -> list[dict[str, Any]]:
        session = policy.session(seed=seed, do_sample=True, **more)
        talk: list[Message] = []
        steps = []
        for news in turns:
            talk += news
            action, _, logprobs, value = await session.get_action(talk, TOOLS)
            assert logprobs is not None
            assert value is None
            talk.append(Message(role="assistant", content=action.get("content"), tool_calls=action.get("tool_calls")))
            steps.append(logprobs)
        return steps

    return run(episode())


ODD = Message(role="tool", content="4 <|end|> é\n", tool_call_id="call_0")
TURNS = [QUESTION, [ODD], [ODD, ODD], [Message(role="user", content="And then?")]]


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_every_step_begins_with_all_that_the_last_one_had(temperature: float) -> None:
    steps = play(local(12, temperature=temperature), TURNS)
    assert len(steps) == 4
    for before, after in pairwise(steps):
        held = [*before["prompt_ids"], *before["token_ids"]]
        assert list(after["prompt_ids"][: len(held)]) == held
        assert len(after["prompt_ids"]) > len(held)
    for step in steps:
        assert len(step["logprobs"]) == len(step["token_ids"])


def test_the_steps_of_an_episode_share_one_buffer() -> None:
    steps = play(local(), TURNS)
    assert len({id(step["prompt_ids"]._items) for step in steps}) == 1


def test_the_prompt_is_the_templates() -> None:
    policy = local()
    first, second = play(policy, TURNS[:2])
    assert list(first["prompt_ids"]) == policy.chat.start(QUESTION, TOOLS)
    closed = [] if first["finish_reason"] != "length" else [policy.chat.end_id]
    between = list(second["prompt_ids"][len(first["prompt_ids"]) + len(first["token_ids"]) :])
    assert between == closed + policy.chat.encode_continuation([ODD], TOOLS)


def test_a_turn_cut_by_length_is_closed_before_the_next() -> None:
    policy = local(1, temperature=50.0)
    first, second = next(
        steps for seed in range(20) if (steps := play(policy, TURNS[:2], seed))[0]["finish_reason"] == "length"
    )
    assert first["token_ids"][-1] != policy.chat.end_id
    held = len(first["prompt_ids"]) + 1
    assert second["prompt_ids"][held] == policy.chat.end_id
    assert list(second["prompt_ids"][held + 1 :]) == policy.chat.encode_continuation([ODD], TOOLS)


def test_a_prompt_that_came_as_tokens_is_used_as_it_is() -> None:
    given = [*prompt(7), 5]
    steps = play(local(), TURNS[:2], prompt_ids=given)
    assert list(steps[0]["prompt_ids"]) == given
    assert list(steps[1]["prompt_ids"][: len(given)]) == given


def test_the_same_seed_gives_the_same_episode_and_another_one_another() -> None:
    policy = local(8, temperature=3.0)
    episodes = [[list(step["token_ids"]) for step in play(policy, TURNS, seed)] for seed in (1, 1, 2)]
    assert episodes[0] == episodes[1] != episodes[2]


def test_turns_of_an_episode_do_not_repeat_each_others_draws() -> None:
    policy = local(8, temperature=1000.0)
    steps = [list(step["token_ids"]) for step in play(policy, TURNS)]
    assert len({tuple(ids) for ids in steps}) == len(steps)


def test_a_greedy_session_ignores_its_seed() -> None:
    async def first(seed: int) -> list[int]:
        _, _, logprobs, _ = await local(8).session(seed=seed, do_sample=False).get_action(QUESTION)
        assert logprobs is not None
        return list(logprobs["token_ids"])

    assert run(first(1)) == run(first(2))


def test_a_reply_with_calls_says_so() -> None:
    """The finish reason is "tool_calls" only for a complete reply: a call cut off by length is not a call."""

    class Saying(LocalPolicy):
        said: Generation

        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
            return self.said

    model, chat = loaded()
    policy = Saying(model, chat, Sampling())
    ids = chat.encode('Hm. <tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>')
    for finish, expected in (("stop", "tool_calls"), ("length", "length")):
        policy.said = Generation(ids, [0.0] * len(ids), finish, 0)  # type: ignore[arg-type]
        action, _, logprobs, _ = run(policy.get_action(QUESTION, TOOLS))
        assert logprobs is not None
        assert logprobs["finish_reason"] == expected
        assert action["tool_calls"][0].name == "calculator"


class Scripted(LocalPolicy):
    """Returns or raises what it was given, and checks nothing."""

    lines: list[str | Exception]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.seen = [*getattr(self, "seen", []), (list(token_ids), sampling.seed)]
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        ids = [*self.chat.encode(line), self.chat.end_id]
        return Generation(ids, [-0.5] * len(ids), "stop", 0)


def scripted(*lines: str | Exception, **more: Any) -> Scripted:
    model, chat = loaded()
    policy = Scripted(model, chat, Sampling(), **more)
    policy.lines = list(lines)
    return policy


def test_a_turn_that_failed_can_be_asked_for_again_without_doubling_a_token() -> None:
    fault = PolicyError("generation failed: RuntimeError: out of memory")
    talk = [*QUESTION, Message(role="assistant", content="4"), ODD]

    async def episode(policy: Scripted, attempts: int) -> list[dict[str, Any]]:
        session = policy.session(seed=1, do_sample=True)
        _, _, first, _ = await session.get_action(QUESTION, TOOLS)
        for _ in range(attempts):
            with pytest.raises(PolicyError):
                await session.get_action(talk, TOOLS)
        _, _, second, _ = await session.get_action(talk, TOOLS)
        assert first is not None
        assert second is not None
        return [first, second]

    smooth, rough = scripted("4", "5"), scripted("4", fault, fault, "5")
    whole, retried = run(episode(smooth, 0)), run(episode(rough, 2))
    assert [list(s["prompt_ids"]) for s in retried] == [list(s["prompt_ids"]) for s in whole]
    assert [s["alignment"] for s in retried] == ["first", "clean"]
    assert rough.seen[1] == rough.seen[2] == rough.seen[3] == smooth.seen[1]


def test_other_tools_from_turn_to_turn_begin_a_new_row() -> None:
    other = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {"properties": {}}}}]

    async def episode(policy: Scripted) -> list[dict[str, Any]]:
        session = policy.session(seed=1, do_sample=True)
        talk, steps = list(QUESTION), []
        for tools in (TOOLS, other, other, None):
            action, _, tokens, _ = await session.get_action(talk, tools)
            assert tokens is not None
            steps.append(tokens)
            talk += [Message(role="assistant", content=action["content"]), ODD]
        return steps

    steps = run(episode(scripted("1", "2", "3", "4")))
    assert [s["alignment"] for s in steps] == ["first", "forked", "clean", "forked"]
    text = loaded()[1].tokenizer.decode(list(steps[1]["prompt_ids"]))
    assert "Tools: search()" in text
    assert "calculator" not in text


def test_a_template_can_be_followed_to_the_letter() -> None:
    odd = '<tool_call>{"name":"calculator","arguments":{"expression":"1"}}</tool_call>'
    steps = {}
    for on_change in ("append", "fork"):
        policy = scripted(odd, "2", on_change=on_change)
        steps[on_change] = [s["alignment"] for s in play(policy, TURNS[:2])]
    assert steps == {"append": ["first", "realigned"], "fork": ["first", "forked"]}


def test_the_parser_may_be_left_to_the_template() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    action, _, _, _ = run(scripted(call, parser="auto").get_action(QUESTION, TOOLS))
    assert action["tool_calls"][0].name == "calculator"


def test_a_parser_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no tool parser 'hermess'; did you mean 'hermes'"):
        scripted(parser="hermess")


def test_both_engines_draw_the_same_tokens() -> None:
    drawn = [run(ask_many(local(engine=engine), 12, 10)) for engine in ENGINES]
    for ours, theirs in zip(*drawn, strict=True):
        assert list(ours.token_ids) == list(theirs.token_ids)
        assert list(ours.logprobs) == pytest.approx(list(theirs.logprobs), abs=1e-4)


def test_a_new_version_is_told_to_the_engine() -> None:
    policy = local()
    run(policy.generate(prompt(), Sampling(max_new_tokens=2)))
    policy.version = 3
    run(policy.generate(prompt(), Sampling(max_new_tokens=2)))
    assert policy.version == 3
    assert policy.metrics()["engine/reused_tokens"] == 0


def test_a_model_that_the_engine_cannot_run_is_run_by_transformers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chat = loaded()
    monkeypatch.setattr("toolwise.policies.local.engine_path", lambda model: ("transformers", "it is recurrent"))
    policy = LocalPolicy(model, chat, Sampling(max_new_tokens=2))
    assert "(it is recurrent)" in caplog.text
    assert "LlamaForCausalLM is not supported by the engine: generating with transformers" in caplog.text
    assert len(run(policy.generate(prompt(), Sampling(max_new_tokens=2))).token_ids) == 2
    assert policy.metrics() == {"policy/version": 0.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_string_ends_a_turn_and_stays_in_it_as_sampled(engine: Any) -> None:
    """The tokens are those that are sampled without it, up to the one that completes it; the next prompt goes on from
    them, never tokenised again."""

    def turn(session: AgentPolicy, messages: Sequence[Message]) -> tuple[str, Any]:
        _, text, record, _ = run(session.get_action(messages))
        assert text is not None
        return text, record

    free_text, free = turn(local(24, engine=engine, temperature=30.0).session(seed=5, do_sample=True), QUESTION)
    assert free["finish_reason"] == "length"
    stop = free_text[27:33]  # across two tokens or more
    policy = local(24, engine=engine, temperature=30.0, stop_strings=("never said", stop))
    session = policy.session(seed=5, do_sample=True)
    text, record = turn(session, QUESTION)
    ids = list(record["token_ids"])
    assert record["finish_reason"] == "stop_string"
    assert ids == list(free["token_ids"])[: len(ids)]
    assert list(record["logprobs"]) == list(free["logprobs"])[: len(ids)]
    decode = loaded()[1].decode
    assert (stop in text, text, stop in decode(ids[:-1])) == (True, decode(ids), False)
    seen = [*record["prompt_ids"], *ids]
    messages = [*QUESTION, Message(role="assistant", content=text), Message(role="user", content="And 3 + 3?")]
    _, second = turn(session, messages)
    rest = list(second["prompt_ids"])[len(seen) :]
    assert list(second["prompt_ids"])[: len(seen)] == seen
    assert rest[0] in loaded()[1].stop_ids  # the end of the turn, which was not sampled
