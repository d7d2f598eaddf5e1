"""Finished groups as bytes: exact, shared where they were shared, and refused where a type is unknown."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from async_cases import async_run, train

from toolwise.messages import Message, Prefix, ToolCall
from toolwise.routing.inference_router import PredictedPrompt
from toolwise.routing.prompts import RoutedMessage, unconditioned
from toolwise.routing.samples import RoutePrediction
from toolwise.training.stored_groups import FinishedPrompt, pack_group, unpack_group
from toolwise.types import EvaluateResult, Rollout, StepData, StopReason, Task, Usage
from toolwise.types.tokens import SampledTokens
from toolwise.types.turns import TurnRoute

TASK = Task(task_id="t", prompt=[Message(role="user", content="how \ud83d many? ☃")], ground_truth={"a": (1, 2.5)})


def group_of(step_info: dict[str, Any] | None = None, **changes: Any) -> FinishedPrompt:
    call = ToolCall(name="search", arguments={"q": "x"}, id="1")
    messages = [*TASK.prompt, Message(role="assistant", content=None, tool_calls=[call])]
    ids = array("i", [5, 6, 7, 8])
    tokens = SampledTokens(
        array("i", [7, 8]), array("f", [-0.1, -1e-30]), Prefix(ids, 2), token_versions=array("q", [3, 4])
    )
    step = StepData.unchecked(
        system_step_index=0,
        observation_data=Prefix(messages, 1),
        action_taken={"type": "text"},
        raw_policy_output="text",
        resulting_messages_history=Prefix(messages, 2),
        policy_logprobs=tokens,
        policy_value_estimate=None,
        is_done=True,
        step_info=step_info or {"array": np.arange(3.0), "nan": float("nan"), 5: np.float32(0.1)},
        base_reward=0.1,
        advantage=None,
        return_to_go=None,
    )
    prediction = RoutePrediction((-0.5, -0.9), head_inputs=((1, 2), torch.tensor([1.5, 2.5], dtype=torch.bfloat16)))
    rollout = Rollout(
        rollout_id="step-0/0/t/0",
        group_id="step-0/0/t",
        batch_data_id=0,
        rollout_offset=0,
        task=TASK,
        route="SEARCH",
        steps=(step,),
        messages=messages,
        stop_reason=StopReason.ANSWERED,
        usage=Usage(calls={"search": 1}, seconds=0.25),
        turn_routes=(TurnRoute(0, "SEARCH", -0.5, prediction=prediction),),
        **changes,
    )
    pending = {"step-0/0/t": PredictedPrompt(TASK, "step-0/0/t", prediction, Random(3))}
    return FinishedPrompt([rollout], [EvaluateResult(score=0.3, metrics={"correct": 1.0})], pending)


def again(group: FinishedPrompt) -> FinishedPrompt:
    packed = pack_group(group)
    assert packed is not None
    assert packed.dtype == np.uint8
    return unpack_group(packed, {TASK.task_id: TASK})


def test_every_value_comes_back_as_it_was() -> None:
    group = group_of()
    found = again(group)
    [old], [new] = group.rollouts, found.rollouts
    assert (new.rollout_id, new.stop_reason, new.usage, new.route) == (
        old.rollout_id,
        old.stop_reason,
        old.usage,
        old.route,
    )
    assert new.task is TASK
    assert list(new.messages) == list(old.messages)
    assert type(new.steps[0].tokens.logprobs) is array
    assert new.steps[0].tokens.logprobs == old.steps[0].tokens.logprobs
    assert list(new.steps[0].tokens.prompt_ids) == [5, 6]
    assert list(new.steps[0].tokens.token_versions or ()) == [3, 4]
    info = new.steps[0].step_info
    assert info["array"].tolist() == [0.0, 1.0, 2.0]
    assert info["nan"] != info["nan"]
    assert info[5] == np.float32(0.1)
    assert found.results == group.results
    assert found.results is not None
    assert found.results[0].model_fields_set == {"score", "metrics"}
    prompt = found.pending["step-0/0/t"]
    assert prompt.rng.random() == Random(3).random()
    assert prompt.prediction.logprobs == (-0.5, -0.9)
    assert torch.equal(prompt.prediction.head_inputs[1], torch.tensor([1.5, 2.5], dtype=torch.bfloat16))


def test_histories_share_one_list_again() -> None:
    [rollout] = again(group_of()).rollouts
    step = rollout.steps[0]
    assert isinstance(step.observation_data, Prefix)
    assert isinstance(step.resulting_messages_history, Prefix)
    assert step.observation_data._items is step.resulting_messages_history._items


def test_a_group_with_an_object_of_unknown_type_is_not_stored() -> None:
    class Own:
        pass

    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert pack_group(group_of({"mine": Own()})) is None
    assert pack_group(group_of({"deep": nested})) is None
    assert pack_group(group_of({"code": print})) is None


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(0),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.tensor(1.5),
        np.zeros((0, 3), np.int8),
        np.array("abc"),
        np.float32(0.1),
    ],
    ids=repr,
)
def test_arrays_without_items_or_dimensions_come_back(value: Any) -> None:
    found = again(group_of({"it": value})).rollouts[0].steps[0].step_info["it"]
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert bool((found == value).all())


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        Counter("aab"),
        defaultdict(list, {1: [2]}),
        OrderedDict(a=1),
        np.ma.array([1, 2], mask=[False, True]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_not_stored(value: Any) -> None:
    assert pack_group(group_of({"it": value})) is None


def test_a_group_whose_object_raises_is_not_stored() -> None:
    class Raises:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("not now")

    assert pack_group(group_of({"it": Raises()})) is None


def test_a_message_that_a_route_has_changed_knows_its_original_again() -> None:
    original = Message(role="system", content="before")
    messages = [RoutedMessage.replacing(original, "after"), RoutedMessage.replacing(None, "added")]
    found = again(group_of({"messages": messages})).rollouts[0].steps[0].step_info["messages"]
    assert [(type(m), m.content) for m in found] == [(RoutedMessage, "after"), (RoutedMessage, "added")]
    assert unconditioned(found) == [original]


def test_the_rollouts_of_a_real_run_come_back_and_train_the_same() -> None:
    run = async_run(1, algorithm={"zero_std_groups": "keep"})
    [result] = train(run, 1)
    group = FinishedPrompt([s.rollout for s in result.scored], [s.result for s in result.scored], {})
    packed = pack_group(group)
    assert packed is not None
    found = unpack_group(packed, {task.task_id: task for task in run.batches.tasks})
    for old, new in zip(group.rollouts, found.rollouts, strict=True):
        assert new.task is old.task
        assert [step.model_dump() for step in new.steps] == [step.model_dump() for step in old.steps]
        assert [m.to_openai() for m in new.messages] == [m.to_openai() for m in old.messages]
        assert new.usage == old.usage
    assert found.results == group.results
