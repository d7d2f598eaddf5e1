"""Other people's code, simulated: policies with and without sessions, tools, text worlds and users, in every mood."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from sim_stage import Episode, Gauge, Mood, Stage

from toolwise.envs.base import BaseEnv, Phase
from toolwise.envs.interactions import BaseInteraction, Reply
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ContextFullError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.tokens import TokenBuffer
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema

ANYWHERE = (
    Mood.RAISES,
    Mood.DIES,
    Mood.HANGS,
    Mood.SLOW_TO_GO,
    *[Mood.DEAF_ONCE] * 2,  # those who come back when all is over are the ones to beware of
    *[Mood.DEAF] * 3,
    Mood.CANCELS_ITSELF,
    Mood.CANCELS_ITS_TASK,
    Mood.EXITS,
    Mood.BLOCKS,
)
IN_A_CALL = (*ANYWHERE, Mood.DOWN)

_END, _ROLES = "\ue000", {"system": "\ue001", "user": "\ue002", "assistant": "\ue003", "tool": "\ue004"}
_PAIRS = {pair: 0x110000 + number for number, pair in enumerate(("th", "in", "er", "an", ' "', "so"))}
_PAIR_OF = {number: pair for pair, number in _PAIRS.items()}


NONSENSE: tuple[Any, ...] = (
    None,
    ({"type": "dance"}, "dance", None, None),
    ({"type": "text"}, 7, None, None),
    ({"type": "text", "content": ["a"]}, "a", None, None),
    ({"type": "tool_call"}, "a", None, None),
    ({"type": "text", "content": "a"}, "a", [-0.5], None),
    ({"type": "text", "content": "a"}, "a", {"token_ids": 3}, None),
)


class ToyChat:
    """Letters and a few pairs of letters as tokens. What is sampled letter by letter is read back in pairs: decoding
    and encoding again is not the identity, as with real tokenizers."""

    end_id = ord(_END)

    def render(self, messages: Sequence[Message], tools: Any = None) -> str:
        return "".join(self._turn(m) for m in messages) + _ROLES["assistant"]

    def _turn(self, message: Message) -> str:
        return f"{_ROLES[message.role]}{said(message.content or '', message.tool_calls)}{_END}"

    def encode_continuation(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        after: Sequence[Message] = (),
        closed: bool = True,
        stop_id: int | None = None,
    ) -> list[int]:
        return ([] if closed else [self.end_id]) + self.encode(self.render(messages))

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            pair = text[at : at + 2]
            ids.append(_PAIRS.get(pair, ord(text[at])))
            at += 2 if pair in _PAIRS else 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(_PAIR_OF.get(i) or chr(i) for i in ids)

    def tail(self, text: str) -> str:
        return text[max(text.rfind(control) for control in (_END, *_ROLES.values())) :]


def said(content: str, calls: Sequence[ToolCall] | None) -> str:
    return content + "".join(f"<{c.name} {json.dumps(c.arguments)}>" for c in calls or ())


class PlainPolicy:
    """Decides by what it sees alone: all rollouts of a task are alike."""

    def __init__(self, stage: Stage, names: Sequence[str], gauge: Gauge) -> None:
        self.stage, self.names, self.gauge = stage, names, gauge
        self.asked = 0

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        self.asked += 1
        turn = sum(m.role == "assistant" for m in observation)
        who = f"policy of {observation[0].content}"
        await self.stage.visit(who, "get_action", None, ANYWHERE, (self.gauge, self.asked), turn=turn)
        action, raw, _ = decide(self.stage, who, turn, self.names)
        return action, raw, None, None


class SessionPolicy(PlainPolicy):
    """One session an episode, which keeps its tokens in the real buffer."""

    def __init__(self, stage: Stage, names: Sequence[str], gauge: Gauge, episodes: dict[int, Episode]) -> None:
        super().__init__(stage, names, gauge)
        self.episodes = episodes

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> Session:
        return Session(self, self.episodes[seed], prompt_ids)


class Session:
    def __init__(self, policy: SessionPolicy, episode: Episode, prompt_ids: Sequence[int] | None) -> None:
        self.policy, self.episode = policy, episode
        self.buffer = TokenBuffer(ToyChat(), prompt_ids=prompt_ids)  # type: ignore[arg-type]
        self.turn = 0

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        policy, stage, who = self.policy, self.policy.stage, f"policy of {self.episode}"
        prompt = self.buffer.prompt(observation, available_tools_specs)
        gauge = (policy.gauge, self.episode)
        await stage.visit(who, "get_action", self.episode, ANYWHERE, gauge, turn=self.turn)
        if (chance := stage.chance(who, "nonsense", self.turn)).random() < 0.03:
            stage.odd.add(self.episode)
            return chance.choice(NONSENSE)
        action, raw, cut = decide(stage, who, self.turn, policy.names)
        sampled = [ord(c) for c in raw]
        if self.buffer.add(sampled if cut else [*sampled, ToyChat.end_id], closed=not cut) == "forked":
            stage.broken(f"{self.episode}: what the policy saw before was changed")
        self.turn += 1
        ids = sampled if cut else [*sampled, ToyChat.end_id]
        logprobs = {
            "prompt_ids": prompt,
            "token_ids": ids,
            "logprobs": array("f", [-0.5] * len(ids)),
            "finish_reason": "length" if cut else "stop",
            "policy_version": 0,
        }
        return action, raw, logprobs, 0.25


def decide(stage: Stage, who: str, turn: int, names: Sequence[str]) -> tuple[dict[str, Any], str, bool]:
    """An action, the words for it, and whether they were cut by their length."""
    chance = stage.chance(who, "decides", turn)
    dice = chance.random()
    if dice < 0.2 or not names:
        return {"type": "text", "content": "the answer"}, "the answer", chance.random() < 0.1
    if dice < 0.23:
        return {"type": "terminate"}, "the end", False
    if dice < 0.26:
        raise ContextFullError("the context is full")
    if dice < 0.3:
        return {"type": "text", "content": "therefore FINAL: 7"}, "therefore FINAL: 7", False
    calls = []
    for number in range(chance.randint(1, 4)):
        kind = chance.choice(("good", "good", "good", "good", "unknown", "bad arguments", "bad json"))
        name = "abacus" if kind == "unknown" else chance.choice(names)
        arguments: Any = {"good": {"x": turn}, "bad arguments": {"x": "no"}, "bad json": "{x"}.get(kind, {})
        calls.append(ToolCall(name=name, arguments=arguments, id=f"call_{number}"))
    action = {"type": "tool_call", "content": "let me see", "tool_calls": calls}
    gap = " " if chance.random() < 0.3 else ""  # another spelling than the template's own
    return action, said(f"let me see{gap}", calls), chance.random() < 0.03


def is_good(call: ToolCall, names: Sequence[str]) -> bool:
    """Whether the tool itself ever sees it."""
    return call.name in names and isinstance(call.arguments, dict) and isinstance(call.arguments.get("x"), int)


class SimTool(BaseTool):
    """A tool for one episode (or, where `episode` is None, for all), which watches over its own life cycle."""

    def __init__(self, stage: Stage, name: str, gauges: Sequence[Gauge], episode: Episode | None = None) -> None:
        parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        schema = OpenAIFunctionToolSchema(function=FunctionSchema(name=name, parameters=parameters))
        super().__init__({"price": 0.5}, schema)
        self.stage, self.episode, self.gauges = stage, episode, gauges
        self.done: dict[str, Counter[str]] = {}
        """instance -> verb -> how often it was begun; "created" where `create` gave the instance back"""

    async def _visit(self, verb: str, instance: str) -> float:
        counts = self.done[instance]
        counts[verb] += 1
        if verb != "create" and not counts["created"]:
            self.stage.broken(f"{instance}: {verb} before create")
        if counts["release"] > (verb == "release"):
            self.stage.broken(f"{instance}: {verb} after release")
        if verb == "calc_reward" and counts[verb] > 1:
            self.stage.broken(f"{instance}: asked for its reward twice")
        keys = {0: object(), 1: self.episode}
        inside = [(gauge, keys[at]) for at, gauge in enumerate(self.gauges)] if verb == "execute" else []
        if verb == "create" and len(self.gauges) > 1:
            inside = [(self.gauges[1], self.episode)]
        turn = counts[verb]
        visit = await self.stage.visit(instance, verb, self.episode, IN_A_CALL, *inside, turn=turn)
        visit.gave = round(self.stage.chance(instance, verb, turn, "gives").random(), 3)
        return float(visit.gave)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance = f"{self.name} of {self.episode} #{len(self.done)}"
        self.done[instance] = Counter()
        await self._visit("create", instance)
        self.done[instance]["created"] += 1
        return instance

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        if not isinstance(parameters.get("x"), int):
            self.stage.broken(f"{instance_id}: executed with {parameters}")
        return f"so {parameters['x']} it is", await self._visit("execute", instance_id), {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        return await self._visit("calc_reward", instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._visit("release", instance_id)


class Watched:
    """What every simulated world notes of its own life."""

    stage: Stage
    episode: Episode
    running: Gauge

    def begin(self, stage: Stage, episode: Episode) -> None:
        self.stage, self.episode = stage, episode
        self.times: dict[str, list[float]] = {}

    def note(self, what: str) -> None:
        self.stage.note(f"world {self.episode}", what)
        self.times.setdefault(what, []).append(self.stage.now)
        if what not in ("close", "final_rewards") and "close" in self.times:
            self.stage.broken(f"{self.episode}: {what} after close")
        if what != "step" and len(self.times[what]) > 1:
            self.stage.broken(f"{self.episode}: {what} twice")
        if what == "final_rewards" and "close" in self.times:
            self.stage.broken(f"{self.episode}: final_rewards after close")


class WatchedToolEnv(Watched, ToolEnv):
    keeps_deadlines: ClassVar[bool] = True

    def set_seed(self, seed: int) -> None:
        self.note("set_seed")

    async def reset(self) -> str:
        self.note("reset")
        return await super().reset()

    async def step(self, action: Any) -> Any:
        self.note("step")
        return await super().step(action)

    async def final_rewards(self) -> dict[str, float]:
        self.note("final_rewards")
        return await super().final_rewards()

    async def close(self) -> None:
        self.note("close")
        await super().close()


class TextWorld(Watched, BaseEnv):
    """A world of rooms that may end well, be cut short, or go wrong for good."""

    structured_actions: ClassVar[bool] = False

    def __init__(self, stage: Stage, episode: Episode, gauge: Gauge) -> None:
        self.begin(stage, episode)
        self.gauge = gauge
        self.turn = 0

    async def _visit(self, what: str, *gauges: tuple[Gauge, Any]) -> None:
        self.note(what)
        await self.stage.visit(f"world {self.episode}", what, self.episode, ANYWHERE, *gauges, turn=self.turn)

    def set_seed(self, seed: int) -> None:
        self.note("set_seed")

    @property
    def state_key(self) -> str | None:
        return f"room {self.turn}"

    def phase_of(self, action: Any) -> Phase:
        return "interaction" if self.turn % 2 else "tool"

    async def reset(self) -> str:
        await self._visit("reset", (self.gauge, self.episode))
        return "You are in a hall."

    async def step(self, action: Any) -> Any:
        await self._visit("step", (self.gauge, self.episode))
        self.turn += 1
        chance = self.stage.chance(self.episode, "world", self.turn)
        if chance.random() < 0.05:
            self.stage.odd.add(self.episode)
            return chance.choice((None, ("a room", 0.5, False), ("", float("nan"), False, {}), (7, 0.5, False, {}), 7))
        kind = chance.choice(("on", "on", "on", "on", "done", "truncated", "critical", "invalid"))
        info: dict[str, Any] = {"is_action_valid": kind != "invalid"}
        if kind == "truncated":
            info["truncated"] = True
        if kind == "critical":
            info["critical_error"] = "you fell"
        return f"You are in room {self.turn}.", 0.5, kind == "done", info

    async def final_rewards(self) -> dict[str, float]:
        await self._visit("final_rewards")
        if (chance := self.stage.chance(self.episode, "rewards")).random() < 0.05:
            self.stage.odd.add(self.episode)
            return cast("dict[str, float]", chance.choice((None, {"quest": "much"}, {"quest": float("inf")}, 0.5)))
        return {"quest": 0.5}

    async def close(self) -> None:
        await self._visit("close")


class SimUser(BaseInteraction):
    """A simulated user who may be anything but well."""

    def __init__(self, stage: Stage, episode: Episode) -> None:
        self.stage, self.episode = stage, episode
        self.turn = 0

    async def _visit(self, what: str) -> None:
        await self.stage.visit(f"user of {self.episode}", what, self.episode, ANYWHERE, turn=self.turn)

    async def start(self, **interaction_kwargs: Any) -> str | None:
        await self._visit("start")
        return None

    async def respond(self, messages: Sequence[Message]) -> Reply:
        self.turn += 1
        await self._visit("respond")
        done = self.stage.chance(self.episode, "user", self.turn).random() < 0.3
        return "Are you sure?", done, None, {}

    async def finish(self) -> None:
        await self._visit("finish")
