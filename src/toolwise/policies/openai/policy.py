"""A policy behind any OpenAI-compatible chat server (vLLM, SGLang, llama.cpp, `toolwise.serve`): messages in, a
decision out, with token ids and log-probs where the server tells them."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from toolwise.errors import PolicyError
from toolwise.messages import Message, Prefix
from toolwise.policies.openai.endpoint import Endpoint, loop_time
from toolwise.policies.openai.reply import Reply, read_reply
from toolwise.protocols import Metrics, Sampling
from toolwise.rollout.parsers import PARSERS, to_action

if TYPE_CHECKING:
    import httpx

_SERVER_PARSER = "openai"
# Servers take top-k, min-p and penalties from the model's folder or have defaults of their own; log-probs to learn
# from are those of the whole distribution.
_NEUTRAL_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class OpenAIAgentPolicy:
    """Asks `model` at `base_url` (…/v1).

    `parser`: "openai" leaves tool calls to the server; any other name finds them in the text here. Tools are shown to
    the model in both cases: the latter asks with `tool_choice="none"`, which to vLLM means "show, do not parse"; for a
    server that then hides them (SGLang), give `extra_body={"tool_choice": "auto"}`.

    `return_token_ids` asks for ids, and for an unshaped distribution, in fields that vLLM and SGLang know and that
    OpenAI's own server refuses. Log-probs count as taken after temperature: start vLLM with
    `--logprobs-mode processed_logprobs` to train at any temperature but 1. Without ids a step's log-probs are a
    `TextLogprobs`: such rollouts can be evaluated, not learned from. `extra_body` wins over all other fields.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        sampling: Sampling | None = None,
        parser: str = _SERVER_PARSER,
        timeout_s: float = 120.0,
        deadline_s: float = 600.0,
        max_retries: int = 5,
        backoff_s: float = 0.5,
        max_concurrent: int = 256,
        logprobs: bool = True,
        return_token_ids: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        seed: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = loop_time,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        if parser != _SERVER_PARSER and parser not in PARSERS:
            raise PolicyError(
                f"there is no parser {parser!r}; there is: {', '.join(dict.fromkeys([_SERVER_PARSER, *PARSERS]))}"
            )
        self.model = model
        self.sampling = sampling or Sampling()
        self.parse = None if parser == _SERVER_PARSER else PARSERS[parser]
        self.logprobs = logprobs
        self.return_token_ids = return_token_ids
        self.extra_body = dict(extra_body or {})
        self.endpoint = Endpoint(
            f"{base_url.rstrip('/')}/chat/completions",
            api_key=api_key,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            max_retries=max_retries,
            backoff_s=backoff_s,
            max_concurrent=max_concurrent,
            seed=seed,
            sleep=sleep,
            clock=clock,
            client=client,
        )
        self._without_ids = 0

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> OpenAISession:
        if prompt_ids is not None:
            raise PolicyError(
                "the task's prompt came as token ids, and a chat server takes messages: give the task a prompt of "
                "messages without prompt_ids, or use the local policy"
            )
        return OpenAISession(self, replace(self.sampling, seed=seed, do_sample=do_sample))

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """One decision without an episode around it."""
        reply = await self.ask(observation, available_tools_specs, self.sampling)
        return (
            to_action(reply.content, reply.calls, reply.reasoning),
            reply.raw,
            cast("dict[str, Any]", reply.logprobs),
            None,
        )

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        sampling: Sampling,
        raw_replies: Mapping[int, str] | None = None,
    ) -> Reply:
        """`raw_replies`: places of messages that go as these texts instead."""
        body = self._body(messages, tools, sampling)
        for place, text in (raw_replies or {}).items():
            body["messages"][place] = {"role": "assistant", "content": text}
        reply = await self.endpoint.ask(body, lambda value, headers: read_reply(value, headers, self.parse))
        self._without_ids += "token_ids" not in reply.logprobs
        return reply

    def _body(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, sampling: Sampling
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_request_message(m) for m in messages],
            "temperature": sampling.temperature if sampling.do_sample else 0.0,
            "top_p": 1.0,
            "max_tokens": sampling.max_new_tokens,
            "seed": sampling.seed & 0x7FFF_FFFF_FFFF_FFFF,
        }
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if tools:
            body["tools"] = list(tools)
            if self.parse is not None:
                body["tool_choice"] = "none"
        if self.logprobs:
            body["logprobs"] = True
        if self.return_token_ids:
            body |= {"return_token_ids": True} | _NEUTRAL_SAMPLING
        return body | self.extra_body

    def metrics(self) -> Metrics:
        return self.endpoint.metrics() | {"policy/without_ids": float(self._without_ids)}

    async def aclose(self) -> None:
        await self.endpoint.aclose()


class OpenAISession:
    """One episode: a seed of its own for each turn, and one buffer that the turns' prompts share as far as the server
    renders each as an extension of the last."""

    def __init__(self, policy: OpenAIAgentPolicy, sampling: Sampling) -> None:
        self.policy = policy
        self.sampling = sampling
        self._turn = 0
        self._tokens = array("i")
        self._raw_replies: dict[int, str] = {}

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        seed = (self.sampling.seed * 1_000_003 + self._turn) & 0x7FFF_FFFF_FFFF_FFFF
        sampling = replace(self.sampling, seed=seed)
        reply = await self.policy.ask(observation, available_tools_specs, sampling, self._raw_replies)
        self._turn += 1
        if self.policy.parse is not None and any(isinstance(call.arguments, str) for call in reply.calls):
            # A server can make nothing of such a call, or drops it: the model is to see what it wrote.
            self._raw_replies[len(observation)] = reply.raw
        logprobs = cast("dict[str, Any]", reply.logprobs)
        if "token_ids" in logprobs:
            logprobs = {**logprobs, "prompt_ids": self._share_prefix(logprobs["prompt_ids"])}
            self._tokens.extend(logprobs["token_ids"])
        return to_action(reply.content, reply.calls, reply.reasoning), reply.raw, logprobs, None

    def _share_prefix(self, prompt_ids: array[int]) -> Prefix[int]:
        """The prompt as a prefix of the episode's buffer: memory grows with the turns, not with their square."""
        held = len(self._tokens)
        if prompt_ids[:held] == self._tokens:
            self._tokens.extend(prompt_ids[held:])
        else:
            self._tokens = prompt_ids
        return Prefix(self._tokens)


def _request_message(message: Message) -> dict[str, Any]:
    """The OpenAI form. Arguments that the model wrote as no JSON object go as a JSON string: servers read arguments as
    JSON, and refuse the whole conversation where they cannot."""
    plain = message.to_openai()
    for call, sent in zip(message.tool_calls or (), plain.get("tool_calls", ()), strict=True):
        if isinstance(call.arguments, str):
            sent["function"]["arguments"] = json.dumps(call.arguments)
    return plain
