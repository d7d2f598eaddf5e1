"""Tickets and finished groups as payloads: route decisions to a worker, rollouts with their rewards back.

Prefixes stay prefixes: the messages of a rollout and the tokens of its context are sent once, however many steps refer
to them.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from toolwise.cluster.interface import ClusterError, Payload
from toolwise.cluster.plain_data import from_payload, to_payload
from toolwise.errors import ConfigError
from toolwise.messages import Message, Prefix, ToolCall
from toolwise.routing.prompts import RoutedMessage
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.turn_choice import TurnChooser
from toolwise.serialization.state import TensorCollector, encode
from toolwise.types import EvaluateResult, Rollout, RouteDecision, StepData, StopReason, Task, Usage
from toolwise.types.tokens import SampledTokens
from toolwise.types.turns import TurnRoute

ROUTER = "router:"
"""Before the names of a router's state, which comes with a ticket whose turns are routed."""
NOT_SENT = {"task", "prompt", "turns", "count_usage", "policy", "wrap_env", "price_calls"}
"""Messages and code."""
DECISION_FIELDS = [field.name for field in dataclasses.fields(RouteDecision) if field.name not in NOT_SENT]
ROLLOUT_FIELDS = ["rollout_id", "group_id", "batch_data_id", "rollout_offset", "route", "fault", "infrastructure_fault"]
ROLLOUT_FIELDS += ["router_log_prob", "router_logits", "answered_by"]
STEP_FIELDS = ["system_step_index", "raw_policy_output", "policy_value_estimate", "is_done", "base_reward"]
STEP_FIELDS += ["advantage", "return_to_go"]


def ticket_to_payload(decision: RouteDecision, *, do_sample: bool) -> dict[str, Any]:
    turns = decision.turns
    if turns is not None and not isinstance(turns, TurnChooser):
        raise ConfigError("router.name: a router of your own that routes turns needs one process")
    fields = {name: getattr(decision, name) for name in DECISION_FIELDS}
    task = {
        name: getattr(decision.task, name)
        for name in Task.model_fields
        if name != "prompt" and getattr(decision.task, name) is not None
    }
    task["prompt"] = [_message(message) for message in decision.task.prompt]
    prompt = [_message(message) for message in decision.prompt]
    routing = None if turns is None else {"explore": turns.explore, "shift": turns.shift}
    ticket = {**fields, "task": task, "prompt": prompt, "do_sample": do_sample, "turns": routing}
    return to_payload(ticket, f"task {task['task_id']}")


def ticket_from_payload(payload: Payload) -> tuple[RouteDecision, bool, dict[str, Any] | None]:
    """The decision, whether to sample, and how to choose the routes of turns."""
    fields = from_payload(payload)
    task = Task(**{**fields["task"], "prompt": [_read_message(message) for message in fields["task"]["prompt"]]})
    prompt = [_read_message(message) for message in fields["prompt"]]
    decision = RouteDecision(task=task, prompt=prompt, **{name: fields[name] for name in DECISION_FIELDS})
    return decision, fields["do_sample"], fields["turns"]


def group_to_payload(rollouts: Sequence[Rollout], results: Sequence[EvaluateResult] | None) -> dict[str, Any]:
    """`results` are the rewards, where the worker computes them."""
    scores = None if results is None else [result.model_dump(exclude_unset=True) for result in results]
    return to_payload({"rollouts": [_rollout(rollout) for rollout in rollouts], "results": scores}, "rollouts")


def group_from_payload(
    payload: Payload, decision: RouteDecision, index: int
) -> tuple[list[Rollout], list[EvaluateResult] | None]:
    """The rollouts of `decision`, which is the batch's at `index`, at its prices."""
    fields = from_payload(payload)
    read = (replace(_read_rollout(one, decision.task), batch_data_id=index) for one in fields["rollouts"])
    rollouts = [_priced(rollout, decision) for rollout in read]
    offsets = [(rollout.group_id, rollout.rollout_offset) for rollout in rollouts]
    if offsets != [(decision.group_id, offset) for offset in range(decision.n)]:
        raise ClusterError(f"asked for the {decision.n} rollouts of {decision.group_id}, got {offsets}")
    scores = fields["results"]
    return rollouts, None if scores is None else [EvaluateResult.model_validate(score) for score in scores]


def _priced(rollout: Rollout, decision: RouteDecision) -> Rollout:
    """With the cost by the decision's price list, which stays in this process."""
    if decision.price_calls is None or decision.count_usage is not None:
        return rollout
    cost = decision.price_calls(rollout.usage.calls) + (decision.price if rollout.steps else 0.0)
    return replace(rollout, usage=replace(rollout.usage, cost=cost))


# --- messages


def _message(message: Message) -> list[Any]:
    """The fields; and if a route has changed the message, the original, which rewards see."""
    fields = {name: getattr(message, name) for name in Message.model_fields if getattr(message, name) is not None}
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    if not isinstance(message, RoutedMessage):
        return [fields]
    return [fields, None if message.original is None else _message(message.original)]


def _read_message(value: Sequence[Any]) -> Message:
    fields: dict[str, Any] = dict.fromkeys(Message.model_fields) | value[0]
    if fields["tool_calls"]:
        fields["tool_calls"] = [_read_call(call) for call in fields["tool_calls"]]
    if len(value) == 1:
        return Message.unchecked(**fields)
    original = None if value[1] is None else _read_message(value[1])
    return RoutedMessage.replacing(original, fields["content"])


def _call(call: ToolCall) -> list[Any]:
    return [call.name, call.arguments, call.id]


def _read_call(value: Sequence[Any]) -> ToolCall:
    return ToolCall.model_construct(name=value[0], arguments=value[1], id=value[2])


# --- rollouts


def _rollout(rollout: Rollout) -> dict[str, Any]:
    contexts = Contexts()
    messages = list(rollout.messages)
    return {
        **{name: getattr(rollout, name) for name in ROLLOUT_FIELDS},
        "messages": [_message(message) for message in messages],
        "steps": [_step(step, messages, contexts) for step in rollout.steps],
        "contexts": contexts.arrays(),
        "stop_reason": rollout.stop_reason.value,
        "usage": {name: dict(v) if isinstance(v, Mapping) else v for name, v in asdict(rollout.usage).items()},
        "tool_rewards": dict(rollout.tool_rewards),
        "turn_routes": [_turn_route(route) for route in rollout.turn_routes],
        "result": None if rollout.result is None else rollout.result.model_dump(exclude_unset=True),
    }


def _read_rollout(fields: Mapping[str, Any], task: Task) -> Rollout:
    messages = [_read_message(message) for message in fields["messages"]]
    contexts = Contexts.read(fields["contexts"])
    return Rollout(
        **{name: fields[name] for name in ROLLOUT_FIELDS},
        task=task,
        steps=tuple(_read_step(step, messages, contexts) for step in fields["steps"]),
        messages=tuple(messages),
        stop_reason=StopReason(fields["stop_reason"]),
        usage=Usage(**fields["usage"]),
        tool_rewards=fields["tool_rewards"],
        turn_routes=tuple(_read_turn_route(route) for route in fields["turn_routes"]),
        result=None if fields["result"] is None else EvaluateResult.model_validate(fields["result"]),
    )


def _turn_route(route: TurnRoute) -> dict[str, Any]:
    """With the head's inputs, which it learns from: the tokens that it read, and their features."""
    fields = {field.name: getattr(route, field.name) for field in dataclasses.fields(route)}
    prediction = None
    if route.prediction is not None:
        prediction = {
            field.name: getattr(route.prediction, field.name) for field in dataclasses.fields(RoutePrediction)
        }
        prompt, features = route.prediction.head_inputs
        prediction["head_inputs"] = [np.asarray(prompt, np.int32), features]
    return {**fields, "message": route.message and _message(route.message), "prediction": prediction}


def _read_turn_route(fields: Mapping[str, Any]) -> TurnRoute:
    prediction = None
    if fields["prediction"] is not None:
        prompt, features = fields["prediction"]["head_inputs"]
        prediction = RoutePrediction(**{**fields["prediction"], "head_inputs": (tuple(prompt.tolist()), features)})
    message = fields["message"] and _read_message(fields["message"])
    return TurnRoute(**{**fields, "message": message, "prediction": prediction})


class Contexts:
    """The token buffers that the prompts of a rollout's steps are prefixes of."""

    def __init__(self) -> None:
        self.longest: dict[int, Sequence[int]] = {}
        self.order: list[int] = []

    def add(self, prompt_ids: Sequence[int]) -> list[int]:
        """Index of the buffer, and length."""
        key = id(prompt_ids._items) if isinstance(prompt_ids, Prefix) else id(prompt_ids)
        if key not in self.longest:
            self.order.append(key)
        if len(prompt_ids) >= len(self.longest.get(key, ())):
            self.longest[key] = prompt_ids
        return [self.order.index(key), len(prompt_ids)]

    def arrays(self) -> list[Any]:
        return [np.fromiter(self.longest[key], np.int32, len(self.longest[key])) for key in self.order]

    @staticmethod
    def read(arrays: Sequence[Any]) -> list[Any]:
        return [array("i", context.astype(np.int32).tobytes()) for context in arrays]


def _step(step: StepData, messages: Sequence[Message], contexts: Contexts) -> dict[str, Any]:
    action = dict(step.action_taken)
    if calls := action.get("tool_calls"):
        action["tool_calls"] = [_call(call) for call in calls]
    tokens = None if step.policy_logprobs is None else step.tokens
    return {
        **{name: getattr(step, name) for name in STEP_FIELDS},
        "observation": _history(step.observation_data, messages),
        "history": _history(step.resulting_messages_history, messages),
        "action": _sendable(action),
        "info": _sendable(step.step_info),
        "tokens": None if tokens is None else encode_tokens(tokens, contexts),
    }


def _read_step(fields: Mapping[str, Any], messages: list[Message], contexts: Sequence[Any]) -> StepData:
    action = fields["action"]
    if calls := action.get("tool_calls"):
        action["tool_calls"] = [_read_call(call) for call in calls]
    return StepData.unchecked(
        **{name: fields[name] for name in STEP_FIELDS},
        observation_data=_read_history(fields["observation"], messages),
        resulting_messages_history=_read_history(fields["history"], messages),
        action_taken=action,
        step_info=fields["info"],
        policy_logprobs=None if fields["tokens"] is None else read_tokens(fields["tokens"], contexts),
    )


def _history(value: Any, messages: Sequence[Message]) -> Any:
    """The length, if it is a prefix of the rollout's messages; the messages themselves, or another observation."""
    if isinstance(value, Prefix | list | tuple) and all(isinstance(item, Message) for item in value):
        if len(value) <= len(messages) and all(mine is its for mine, its in zip(messages, value, strict=False)):
            return len(value)
        return {"messages": [_message(message) for message in value]}
    return {"other": _sendable(value)}


def _read_history(value: Any, messages: list[Message]) -> Any:
    if isinstance(value, int):
        return Prefix(messages, value)
    return value["other"] if "other" in value else [_read_message(message) for message in value["messages"]]


def encode_tokens(tokens: SampledTokens, contexts: Contexts) -> dict[str, Any]:
    return {
        "token_ids": np.fromiter(tokens.token_ids, np.int32, len(tokens.token_ids)),
        "logprobs": np.fromiter(tokens.logprobs, np.float64, len(tokens.logprobs)),
        "prompt": contexts.add(tokens.prompt_ids),
        "versions": None
        if tokens.token_versions is None
        else np.fromiter(tokens.token_versions, np.int64, len(tokens.token_versions)),
        "labels": [tokens.finish_reason, tokens.policy_version, tokens.alignment, tokens.has_ids],
        "extra": _sendable(dict(tokens.extra or {})),
    }


def read_tokens(fields: Mapping[str, Any], contexts: Sequence[Any]) -> SampledTokens:
    finish_reason, policy_version, alignment, has_ids = fields["labels"]
    index, length = fields["prompt"]
    return SampledTokens(
        array("i", fields["token_ids"].astype(np.int32).tobytes()),
        array("d", fields["logprobs"].tobytes()),
        Prefix(contexts[index], length),
        finish_reason,
        policy_version,
        alignment,
        has_ids,
        fields["extra"] or None,
        None if fields["versions"] is None else array("q", fields["versions"].tobytes()),
    )


def _sendable(value: Any) -> Any:
    """`value`, with the text of whatever cannot be sent: an environment may note any object."""
    try:
        encode(value, "", TensorCollector())
        return value
    except TypeError:
        if isinstance(value, dict):
            return {str(key): _sendable(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_sendable(item) for item in value]
        return repr(value)
