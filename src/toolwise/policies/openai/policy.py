"""A policy on any OpenAI-compatible chat server (vLLM, SGLang, llama.cpp, `toolwise.serve`), with token ids and
log-probs if the server returns them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolwise.errors import PolicyError
from toolwise.messages import Message, Prefix
from toolwise.policies.openai.reply import NEUTRAL_SAMPLING, Reply, read_reply
from toolwise.protocols import Metrics, Sampling
from toolwise.remote.endpoint import Endpoint
from toolwise.rollout.parsers import PARSERS, to_action

if TYPE_CHECKING:
    import httpx

_SERVER_PARSER = "openai"


class OpenAIAgentPolicy:
    """Queries `model` at `base_url` (…/v1).

    `parser`: "openai" leaves parsing tool calls to the server; any other name parses them from the text here. The model
    sees its tools in both cases: the latter requests `tool_choice="none"`, which to vLLM means "show, do not parse";
    for a server that then hides them (SGLang), set `extra_body={"tool_choice": "auto"}`.

    `return_token_ids` requests ids and an unmodified distribution, in fields that vLLM and SGLang accept and OpenAI's
    own server rejects. Log-probs are taken to be after temperature: start vLLM with
    `--logprobs-mode processed_logprobs` to train at a temperature other than 1. Without ids, a step has only the text
    of its tokens: such rollouts can be evaluated, but not trained on. `extra_body` overrides all other fields.
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
        retries_when_down: bool = True,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        if parser != _SERVER_PARSER and parser not in PARSERS:
            raise PolicyError(
                f"there is no parser {parser!r}; choose one of {', '.join(dict.fromkeys([_SERVER_PARSER, *PARSERS]))}"
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
            retries_when_down=retries_when_down,
            client=client,
        )
        self._without_ids = 0

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> OpenAISession:
        if prompt_ids is not None:
            raise PolicyError(
                "the task's prompt is given as token ids, but a chat server takes messages: give the task a prompt of "
                "messages without prompt_ids, or use the local policy"
            )
        return OpenAISession(self, replace(self.sampling, seed=seed, do_sample=do_sample))

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """A single decision, outside of an episode."""
        reply = await self.ask(observation, available_tools_specs, self.sampling)
        return (
            to_action(reply.content, reply.calls, reply.reasoning),
            reply.raw,
            reply.tokens.to_dict(),
            None,
        )

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        sampling: Sampling,
        raw_replies: Mapping[int, str] | None = None,
    ) -> Reply:
        """`raw_replies`: texts to send instead of the messages at these indices."""
        body = self._body(messages, tools, sampling)
        for index, text in (raw_replies or {}).items():
            body["messages"][index] = {"role": "assistant", "content": text}
        reply = await self.endpoint.ask(body, lambda value, headers: read_reply(value, headers, self.parse))
        self._without_ids += not reply.tokens.has_ids
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
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        if tools:
            body["tools"] = list(tools)
            if self.parse is not None:
                body["tool_choice"] = "none"
        if self.logprobs:
            body["logprobs"] = True
        if self.return_token_ids:
            body |= {"return_token_ids": True} | NEUTRAL_SAMPLING
            if sampling.stop_strings:  # in the text as in the tokens
                body["include_stop_str_in_output"] = True
        return body | self.extra_body

    def metrics(self) -> Metrics:
        return self.endpoint.metrics() | {"policy/without_ids": float(self._without_ids)}

    async def aclose(self) -> None:
        await self.endpoint.aclose()


class OpenAISession:
    """One episode: one seed per turn, and one token buffer that the turns' prompts share as long as the server renders
    each as an extension of the last."""

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
            # A server rejects or drops such a call: send the raw text, so that the model sees what it wrote.
            self._raw_replies[len(observation)] = reply.raw
        logprobs = reply.tokens.to_dict()
        if reply.tokens.has_ids:
            logprobs["prompt_ids"] = self._share_prefix(logprobs["prompt_ids"])
            self._tokens.extend(logprobs["token_ids"])
        return to_action(reply.content, reply.calls, reply.reasoning), reply.raw, logprobs, None

    def _share_prefix(self, prompt_ids: array[int]) -> Prefix[int]:
        """The prompt as a prefix of the episode's buffer, so that memory grows linearly with the turns."""
        length = len(self._tokens)
        if prompt_ids[:length] == self._tokens:
            self._tokens.extend(prompt_ids[length:])
        else:
            self._tokens = prompt_ids
        return Prefix(self._tokens)


def _request_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format. Arguments that are not a JSON object are sent as a JSON string: servers parse
    arguments as JSON, and reject the whole conversation if they cannot."""
    body = message.to_openai()
    for call, call_body in zip(message.tool_calls or (), body.get("tool_calls", ()), strict=True):
        if isinstance(call.arguments, str):
            call_body["function"]["arguments"] = json.dumps(call.arguments)
    return body
