"""A recorded session: its calls, its limits, and the rollout that closing it yields."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
from agent_sessions import CALL, TASK, TOOLS, session_with

from toolwise.errors import ContextFullError, PolicyError
from toolwise.learner.packing import micro_batches
from toolwise.learner.rows import build_rows
from toolwise.messages import Message
from toolwise.rewards.executor import score_episodes
from toolwise.rollout.agents.recorded_call import CallOptions
from toolwise.rollout.agents.recorded_session import ContextLimitError, SessionEndedError, SessionLimitError
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StopReason,
)

AGAIN = Message(role="user", content="Sure?")


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def credited(rollout: Rollout) -> CreditedRollout:
    scored = ScoredRollout(rollout, EvaluateResult(score=1.0), rollout.steps)
    advantages = tuple(np.ones(len(step.tokens.token_ids)) for step in rollout.steps)
    return CreditedRollout(AnnotatedRollout(scored), rollout.steps, advantages)


@run_async
async def test_a_closed_session_is_a_rollout() -> None:
    session = session_with(CALL, "It is 4.")
    session.begin()
    first = await session.complete(TASK.prompt, TOOLS)
    assert first.reply.tool_calls is not None
    result = Message(role="tool", content="4", tool_call_id="call_0")
    await session.complete([*TASK.prompt, first.reply, result], TOOLS)
    rollout = session.close(1)
    assert (rollout.rollout_id, rollout.stop_reason, rollout.trainable) == ("g/0", StopReason.ANSWERED, True)
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert [step.is_done for step in rollout.steps] == [False, True]
    assert rollout.usage.calls == {"calculator": 1}
    assert rollout.usage.sampled_tokens == sum(len(step.tokens.token_ids) for step in rollout.steps)
    assert score_episodes("agent", [rollout])[0].score == 1.0
    assert rollout.steps[0].tokens.policy_version == 3
    assert len(build_rows([credited(rollout)])) == 1


@run_async
async def test_branches_become_rows_whose_common_tokens_are_computed_once() -> None:
    session = session_with("4" * 40, "Yes.", "No.", "Maybe.")
    first = await session.complete(TASK.prompt)
    for question in ("Sure?", "Really?", "Are you?"):
        await session.complete([*TASK.prompt, first.reply, Message(role="user", content=question)])
    rollout = session.close()
    assert session.branches == 2
    rows = build_rows([credited(rollout)])
    assert len(rows) == 3
    assert sum(sum(row.sampled) for row in rows) == rollout.usage.sampled_tokens
    computed = sum(len(packed.ids) for packed in micro_batches(rows, 10_000, share_prefixes=True))
    shared = len(rollout.steps[0].tokens.prompt_ids) + len(rollout.steps[0].tokens.token_ids)
    assert computed <= sum(map(len, rows)) - 2 * shared


@run_async
async def test_interleaved_sub_agents_train_every_sampled_token_once() -> None:
    session = session_with("a" * 40, "b" * 40, "c", "d")
    helper = [Message(role="user", content="Help.")]
    one = await session.complete(TASK.prompt)
    two = await session.complete(helper)
    await session.complete([*TASK.prompt, one.reply, AGAIN])
    await session.complete([*helper, two.reply, AGAIN])
    rollout = session.close()
    rows = build_rows([credited(rollout)])
    assert sum(sum(row.sampled) for row in rows) == rollout.usage.sampled_tokens
    longest = sum(len(s.tokens.prompt_ids) + len(s.tokens.token_ids) for s in rollout.steps[2:])
    assert sum(len(packed.ids) for packed in micro_batches(rows, 10_000, share_prefixes=True)) <= longest


@run_async
async def test_the_sampling_is_the_runs_and_each_call_has_a_seed() -> None:
    session = session_with("1", "2", do_sample=False)
    await session.complete(TASK.prompt, options=CallOptions(max_new_tokens=1000))
    await session.complete(TASK.prompt, options=CallOptions(max_new_tokens=7))
    policy: Any = session.policy
    (_, one), (_, two) = policy.asked
    assert (one.max_new_tokens, two.max_new_tokens) == (256, 7)
    assert not one.do_sample
    assert one.seed != two.seed


@run_async
async def test_a_stop_string_ends_text_and_tokens() -> None:
    session = session_with("one STOP two", "three")
    call = await session.complete(TASK.prompt, options=CallOptions(stop=("STOP",)))
    assert call.reply.content == "one "
    assert session.policy.chat.decode(call.tokens.token_ids) == "one STOP"
    assert call.tokens.finish_reason == "stop"
    await session.complete([*TASK.prompt, call.reply, AGAIN])
    assert session.branches == 0


@run_async
async def test_calls_in_a_reply_that_was_cut_off_stay_text() -> None:
    session = session_with(CALL)
    call = await session.complete(TASK.prompt, TOOLS, CallOptions(max_new_tokens=30))
    assert call.tokens.finish_reason == "length"
    assert call.reply.tool_calls is None


@run_async
async def test_limits_of_a_session_are_its_stop_reason() -> None:
    session = session_with("1", "2", max_calls=1)
    await session.complete(TASK.prompt)
    with pytest.raises(SessionLimitError, match=r"agent\.max_calls"):
        await session.complete(TASK.prompt)
    assert session.limit_reached is not None
    assert session.limit_reached.reason is StopReason.MAX_STEPS
    tokens = session_with("1", "2", max_tokens=1)
    await tokens.complete(TASK.prompt)
    with pytest.raises(SessionLimitError, match="max_episode_tokens"):
        await tokens.complete(TASK.prompt)
    full = session_with(ContextFullError("full"))
    with pytest.raises(SessionLimitError):
        await full.complete(TASK.prompt)
    assert full.limit_reached is not None
    assert full.limit_reached.reason is StopReason.PROMPT_TOO_LONG


@run_async
async def test_a_call_that_is_too_long_does_not_end_the_session() -> None:
    session = session_with("1", ContextFullError("full"), "2", max_prompt_chars=100)
    first = await session.complete(TASK.prompt)
    history = [*TASK.prompt, first.reply, AGAIN]
    with pytest.raises(ContextLimitError, match="full"):
        await session.complete(history)
    assert session.limit_reached is not None
    assert session.limit_reached.reason is StopReason.MAX_TOKENS
    await session.complete(history)
    assert session.limit_reached is None
    assert [call.origin for call in session.calls] == ["first", "continued"]
    with pytest.raises(ContextLimitError, match="1,014 characters"):  # before anything is rendered
        await session.complete([*TASK.prompt, Message(role="user", content="x" * 1000)])


@run_async
async def test_each_token_keeps_its_version() -> None:
    session = session_with("12")
    sample = session.policy.generate

    async def two_versions(*args: Any) -> Any:
        return replace(await sample(*args), token_versions=[3, 3, 4])

    session.policy.generate = two_versions  # type: ignore[method-assign]
    call = await session.complete(TASK.prompt)
    assert list(call.tokens.token_versions or ()) == [3, 3, 4]


@run_async
async def test_a_failed_call_is_not_recorded_and_may_be_made_again() -> None:
    session = session_with("1", PolicyError("down"), "2")
    first = await session.complete(TASK.prompt)
    with pytest.raises(PolicyError):
        await session.complete([*TASK.prompt, first.reply, AGAIN])
    assert session.policy_fault == "PolicyError: down"
    await session.complete([*TASK.prompt, first.reply, AGAIN])
    assert session.policy_fault is None
    assert [call.origin for call in session.calls] == ["first", "continued"]


@run_async
async def test_closing_ends_calls_in_progress() -> None:
    event = asyncio.Event()
    session = session_with(event)
    call = asyncio.ensure_future(session.complete(TASK.prompt))
    await asyncio.sleep(0)
    rollout = session.close()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rollout.steps == ()
    with pytest.raises(SessionEndedError):
        await session.complete(TASK.prompt)


@run_async
async def test_tokens_in_and_out_are_recorded_too() -> None:
    session = session_with("It is 4.", "Yes.", "No.")
    chat = session.policy.chat
    prompt = chat.start(TASK.prompt)
    first = await session.generate(prompt, CallOptions())
    await session.generate([*prompt, *first.tokens.token_ids, *chat.encode("\n")], CallOptions(stop_token_ids=(5,)))
    await session.generate(prompt[1:], CallOptions())
    assert [call.tokens.alignment for call in session.calls] == ["first", "clean", "forked"]
    rollout = session.close(EvaluateResult(score=0.5, metrics={"format": 1.0}))
    assert len(build_rows([credited(rollout)])) == 2
    assert rollout.messages[-1].content == "No."
    assert rollout.result is not None
    assert rollout.result.metrics["format"].score == 1.0


def test_an_agent_without_a_reward_is_told_so() -> None:
    async def rollouts() -> list[Rollout]:
        silent = session_with("1")
        await silent.complete(TASK.prompt)
        stopped = session_with()
        return [
            silent.close(),
            stopped.close(stop_reason=StopReason.MAX_STEPS),
            session_with().close(stop_reason=StopReason.ENV_FAULT, fault="boom"),
        ]

    silent, stopped, failed = score_episodes("agent", asyncio.run(rollouts()))
    assert silent.error is not None
    assert "return a number" in silent.error.message
    assert stopped.score == 0.0
    assert failed.error is not None
    assert failed.error.message == "boom"


@run_async
async def test_long_conversations_are_tokenised_beside_the_event_loop() -> None:
    session = session_with("4", "Yes.", "No.")
    threads: list[threading.Thread] = []
    encode = session.policy.chat.encode

    def note(text: str) -> list[int]:
        if len(text) > 1000:
            threads.append(threading.current_thread())
        return encode(text)

    session.policy.chat.encode = note  # type: ignore[method-assign]
    long = [Message(role="user", content="word " * 5000)]
    first = await session.complete(long)
    assert threads
    assert threading.current_thread() not in threads
    again = [*long, first.reply, AGAIN]
    await asyncio.gather(session.complete(again), session.complete(again))
    assert [call.origin for call in session.calls] == ["first", "continued", "branched"]


@run_async
async def test_a_long_call_that_is_cancelled_while_it_is_tokenised_leaves_no_trace() -> None:
    session, entered, goes_on = session_with("4", "Yes."), threading.Event(), threading.Event()
    long = [Message(role="user", content="word " * 5000)]
    first = await session.complete(long)
    prompt = session._graph.prompt

    def slow(*arguments: Any) -> Any:
        entered.set()
        goes_on.wait(10)
        return prompt(*arguments)

    session._graph.prompt = slow  # type: ignore[method-assign]
    given_up = asyncio.ensure_future(session.complete([*long, first.reply, AGAIN]))
    await asyncio.to_thread(entered.wait, 10)
    given_up.cancel()
    second = asyncio.ensure_future(session.complete([*long, first.reply, AGAIN]))
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await second).origin == "continued"
