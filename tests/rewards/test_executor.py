"""The in-process executor: every rollout gets a result, in order, whatever the function does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from toolwise.concurrency import deadlines
from toolwise.messages import Message, ToolCall
from toolwise.rewards import Reward, reward_function
from toolwise.rewards.executor import InProcessExecutor
from toolwise.types import EvaluateResult, Rollout, StopReason, Task, Usage


def rollout(said: str, truth: Any = "yes", **columns: Any) -> Rollout:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], ground_truth=truth, reward_kwargs=columns)
    messages = (*task.prompt, Message(role="assistant", content=said, tool_calls=[ToolCall(name="f")]))
    return Rollout(said, "g", 0, 0, task, None, (), messages, StopReason.ANSWERED, Usage())


def evaluate(
    function: Callable[..., Any], rollouts: Sequence[Rollout], kwargs: dict[str, Any] | None = None, step: int = 0
) -> list[EvaluateResult]:
    return asyncio.run(InProcessExecutor().evaluate(Reward.of(function, kwargs), rollouts, step=step))


def kinds(results: Sequence[EvaluateResult]) -> list[str | None]:
    return [r.error.kind if r.error else None for r in results]


def right(messages: list[Message], ground_truth: Any) -> float:
    return float(messages[-1].content == ground_truth)


def test_pointwise() -> None:
    results = evaluate(right, [rollout("yes"), rollout("no"), rollout("no", truth="no")])
    assert [r.score for r in results] == [1.0, 0.0, 1.0]


def test_batch() -> None:
    @reward_function
    def longest(rollouts_messages: list[list[Message]], ground_truths: list[Any]) -> list[float]:
        lengths = [len(m[-1].content or "") for m in rollouts_messages]
        return [float(length == max(lengths)) for length in lengths]

    assert [r.score for r in evaluate(longest, [rollout("a"), rollout("abc"), rollout("ab")])] == [0.0, 1.0, 0.0]


def test_coroutines_are_awaited_in_both_modes() -> None:
    async def one(messages: list[Message], ground_truth: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"score": 0.5}

    async def many(rollouts_messages: list[list[Message]], ground_truths: list[Any]) -> list[EvaluateResult]:
        await asyncio.sleep(0)
        return [EvaluateResult(score=float(i)) for i in range(len(rollouts_messages))]

    assert [r.score for r in evaluate(one, [rollout("a")])] == [0.5]
    assert [r.score for r in evaluate(many, [rollout("a"), rollout("b")])] == [0.0, 1.0]


def test_an_exception_is_a_typed_result_and_the_others_are_still_scored() -> None:
    def fragile(messages: list[Message], ground_truth: Any) -> float:
        if messages[-1].content == "boom":
            raise KeyError("no such thing")
        return 1.0

    results = evaluate(fragile, [rollout("a"), rollout("boom"), rollout("b")])
    assert kinds(results) == [None, "exception", None]
    fault = results[1].error
    assert fault is not None
    assert fault.message == "KeyError: 'no such thing'"
    assert "fragile" in fault.traceback
    assert not results[1].has_valid_score


def test_an_exception_in_a_batch_is_a_typed_result_for_all() -> None:
    def broken(rollouts_messages: Any, ground_truths: Any) -> list[float]:
        raise RuntimeError("down")

    assert kinds(evaluate(broken, [rollout("a"), rollout("b")])) == ["exception", "exception"]


def test_an_exception_in_a_coroutine_is_typed_too() -> None:
    async def broken(messages: Any, ground_truth: Any) -> float:
        await asyncio.sleep(0)
        raise RuntimeError("down")

    assert kinds(evaluate(broken, [rollout("a")])) == ["exception"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "bad_type"),
        ({"scroe": 1.0}, "bad_type"),
        ("1", "bad_type"),
        (float("nan"), "non_finite"),
        ({}, "bad_type"),
    ],
)
def test_nonsense_is_typed(value: Any, kind: str) -> None:
    def nonsense(messages: Any, ground_truth: Any) -> Any:
        return value

    assert kinds(evaluate(nonsense, [rollout("a")])) == [kind]


def test_a_batch_of_the_wrong_length_is_typed() -> None:
    def short(rollouts_messages: Any, ground_truths: Any) -> list[float]:
        return [1.0]

    assert kinds(evaluate(short, [rollout("a"), rollout("b")])) == ["wrong_length", "wrong_length"]


def test_a_missing_required_argument_is_the_function_s_exception() -> None:
    def needy(messages: Any, ground_truth: Any, criteria: str) -> float:
        return 1.0

    results = evaluate(needy, [rollout("a", criteria="strict"), rollout("b")])
    assert kinds(results) == [None, "exception"]
    assert "criteria" in (results[1].reason or "")


def test_arguments_come_from_the_configuration_the_task_and_the_step() -> None:
    seen: list[dict[str, Any]] = []

    def watch(messages: Any, ground_truth: Any, **kwargs: Any) -> float:
        seen.append(kwargs)
        return 1.0

    evaluate(watch, [rollout("a", criteria="x"), rollout("b")], {"price": 0.1}, step=7)
    assert seen == [{"step": 7, "criteria": "x", "price": 0.1}, {"step": 7, "price": 0.1}]


def test_a_function_without_room_for_them_gets_none_of_them() -> None:
    assert evaluate(right, [rollout("yes", criteria="x")], step=3)[0].score == 1.0


def test_a_batch_gets_its_task_columns_as_lists_in_order() -> None:
    seen: dict[str, Any] = {}

    def watch(rollouts_messages: Any, ground_truths: list[Any], **kwargs: Any) -> list[float]:
        seen.update(kwargs, truths=ground_truths)
        return [0.0] * len(ground_truths)

    evaluate(watch, [rollout("a", 1, level="low"), rollout("b", 2)], {"judge": "j"}, step=2)
    assert seen == {"step": 2, "level": ["low", None], "judge": "j", "truths": [1, 2]}


def test_whatever_a_function_does_to_its_arguments_the_rollouts_stay_as_they_were() -> None:
    """The rollouts of a group share one ground truth: a function that modifies it must not affect the next rollout."""

    def greedy(messages: list[Message], ground_truth: dict[str, int], notes: list[str]) -> float:
        messages[-1].content = "changed"
        (messages[-1].tool_calls or []).clear()
        messages.clear()
        notes.append("seen")
        return float(ground_truth.pop("answer"))

    first = rollout("a", {"answer": 3}, notes=[])
    second = Rollout(*[getattr(first, name) for name in Rollout.__slots__])
    assert [r.score for r in evaluate(greedy, [first, second])] == [3.0, 3.0]
    assert first.messages[-1].content == "a"
    assert first.messages[-1].tool_calls
    assert first.task.ground_truth == {"answer": 3}
    assert first.task.reward_kwargs == {"notes": []}


def test_no_rollouts_no_results() -> None:
    assert evaluate(right, []) == []


def in_group(said: str, group: str) -> Rollout:
    return replace(rollout(said, truth=group), rollout_id=f"{group}/{said}", group_id=group)


def test_groupwise_sees_the_rollouts_of_one_task_and_no_others() -> None:
    seen = []

    @reward_function
    def rank(group_messages: list[list[Message]], ground_truth: Any) -> list[float]:
        said = [m[-1].content or "" for m in group_messages]
        seen.append((ground_truth, said))
        return [float(sorted(said).index(text)) for text in said]

    results = evaluate(rank, [in_group("b", "x"), in_group("q", "y"), in_group("a", "x"), in_group("r", "y")])
    assert [r.score for r in results] == [1.0, 0.0, 0.0, 1.0]
    assert seen == [("x", ["b", "a"]), ("y", ["q", "r"])]


def test_a_groupwise_call_that_fails_takes_only_its_own_group_with_it() -> None:
    @reward_function(mode="group")
    def picky(messages: list[list[Message]], ground_truth: Any) -> list[float]:
        if ground_truth == "x":
            raise RuntimeError("not this one")
        return [1.0] * (1 if ground_truth == "z" else len(messages))

    rollouts = [in_group("b", "x"), in_group("q", "y"), in_group("a", "x"), in_group("c", "z"), in_group("d", "z")]
    results = evaluate(picky, rollouts)
    assert kinds(results) == ["exception", None, "exception", "wrong_length", "wrong_length"]
    assert results[1].score == 1.0


def test_who_asks_for_the_length_of_the_prompt_is_given_it() -> None:
    def pointwise(messages: Any, ground_truth: Any, prompt_length: int) -> float:
        return prompt_length

    def batch(rollouts_messages: Any, ground_truths: Any, prompt_length: list[int]) -> list[int]:
        return prompt_length

    def group(group_messages: Any, ground_truth: Any, prompt_length: int) -> list[int]:
        return [prompt_length] * len(group_messages)

    for function in (pointwise, batch, group):
        assert [r.score for r in evaluate(function, [rollout("a"), rollout("b")])] == [1.0, 1.0]
    # A data column with that name takes precedence.
    assert evaluate(pointwise, [rollout("a", prompt_length=7)])[0].score == 7.0


def test_async_groups_overlap() -> None:
    running = most = 0

    async def slow(group_messages: Any, ground_truth: Any) -> list[float]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return [1.0] * len(group_messages)

    rollouts = [replace(rollout("a"), group_id=f"g{i}") for i in range(4)]
    assert [r.score for r in evaluate(slow, rollouts)] == [1.0] * 4
    assert most == 4


class Panic(BaseException):
    """Like the panic exception of a Rust extension."""


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise GeneratorExit


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    raise ValueError("cancelled")


def stop_loop() -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Panic, Mute, cancel_all, stop_loop]
)
@pytest.mark.parametrize("mode", ["pointwise", "awaited", "batch", "group"])
def test_what_would_end_the_program_is_a_result(fault: Any, mode: str) -> None:
    def bad(said: str | None) -> float:
        if said != "bad":
            return 1.0
        if isinstance(fault, type):
            raise fault
        fault()
        return 0.0

    def pointwise(messages: list[Message], ground_truth: Any) -> float:
        return bad(messages[-1].content)

    async def awaited(messages: list[Message], ground_truth: Any) -> float:
        await asyncio.sleep(0)
        return bad(messages[-1].content)

    @reward_function
    def batch(rollouts_messages: list[list[Message]], ground_truths: list[Any]) -> list[float]:
        return [bad(messages[-1].content) for messages in rollouts_messages]

    @reward_function(mode="group")
    def group(group_messages: list[list[Message]], ground_truth: Any) -> list[float]:
        return [bad(messages[-1].content) for messages in group_messages]

    function: Any = {"pointwise": pointwise, "awaited": awaited, "batch": batch, "group": group}[mode]
    good, ill = replace(rollout("good"), group_id="other"), rollout("bad")
    results = deadlines.run(InProcessExecutor().evaluate(Reward.of(function), [good, ill, good], step=0))
    shared = "exception" if mode == "batch" else None
    assert kinds(results) == [shared, "exception", shared]


def test_a_real_cancellation_is_no_result() -> None:
    async def slow(messages: list[Message], ground_truth: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def whole() -> None:
        await asyncio.wait_for(InProcessExecutor().evaluate(Reward.of(slow), [rollout("a")], step=0), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(whole())
