"""A local policy whose replies are reported as text while they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.messages import Message
from toolwise.policies.local import LimitedPolicy, LocalPolicy, LocalSession
from toolwise.protocols import AgentPolicy
from toolwise.rollout.text_stream import OnText, TextStream

Reply = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


def stream_text(policy: AgentPolicy, on_text: OnText) -> AgentPolicy:
    """`policy` with `on_text` called for each new piece of a reply; other policies than local ones are unchanged."""
    return StreamedPolicy(policy, on_text) if isinstance(policy, LocalPolicy | LimitedPolicy) else policy


@dataclass(frozen=True, slots=True)
class StreamedPolicy:
    policy: LocalPolicy | LimitedPolicy
    on_text: OnText

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> StreamedSession:
        return StreamedSession(self.policy.session(seed=seed, do_sample=do_sample, prompt_ids=prompt_ids), self.on_text)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> Reply:
        return await self.policy.get_action(observation, available_tools_specs)


@dataclass(frozen=True, slots=True)
class StreamedSession:
    session: LocalSession
    on_text: OnText

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> Reply:
        chat, stops = self.session.policy.chat, self.session.sampling.stop_token_ids
        stream = TextStream(lambda ids: chat.decode(ids, stops), self.on_text)
        self.session.on_tokens = stream.add
        reply = await self.session.get_action(observation, available_tools_specs)
        stream.finish(reply[1] or "")
        return reply

    def next_prompt(self, observation: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        return self.session.next_prompt(observation, tools)

    def limit_turns(self, *, max_new_tokens: int | None = None, bans_calls: bool = False) -> None:
        self.session.limit_turns(max_new_tokens=max_new_tokens, bans_calls=bans_calls)
