"""Parse chat completions of OpenAI, vLLM, SGLang and llama.cpp, with their tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from toolwise.messages import Message, ToolCall
from toolwise.remote.server_errors import ServerError
from toolwise.types import SampledTokens
from toolwise.types.tokens import TOKEN_COUNTS

FinishReason = Literal["stop", "length", "tool_calls", "stop_string"]
Parse = Callable[[str], tuple[str, list[ToolCall]]]

_TOKEN_ID = "token_id:"
# Servers take top-k, min-p and penalties from the model's folder or have their own defaults; training needs log-probs
# of the full distribution.
NEUTRAL_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed and validated reply."""

    content: str
    calls: list[ToolCall]
    raw: str
    """The text as the server returns it, without tool calls that the server parsed out of it."""
    tokens: SampledTokens
    """Without token ids from the server, `tokens`, `token_logprobs` and its counts of tokens as further keys."""
    reasoning: str = ""
    """Thoughts that the server returns separately from the text; sent back to it in later turns."""


def read_reply(body: Any, headers: Mapping[str, str], parse: Parse | None) -> Reply:
    """Parse a reply. `parse` extracts tool calls from the text; None uses those parsed by the server."""
    choice = first_choice(body)
    message, reasoning = _message(choice)
    text = message.content or ""
    content, calls = parse(text) if parse is not None else (text, [])
    if not calls:  # those that the server parsed, with or without ids
        parsed = message.tool_calls or ()
        calls = [c if c.id else c.model_copy(update={"id": f"call_{i}"}) for i, c in enumerate(parsed)]
    finish = _finish_reason(choice, bool(calls))
    tokens, logprobs = _logprobs(choice)
    prompt_ids = parse_ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"), "prompt_token_ids")
    token_ids = _token_ids(choice, tokens)
    counts = _token_counts(body)
    if not (text or calls or reasoning or token_ids or tokens or counts.get("completion_tokens")):
        raise ServerError("bad_reply", "the reply is empty: no text, tool calls or tokens", retryable=True)
    labels = finish, _policy_version(body, headers)
    raw = f"<think>{reasoning}</think>{text}" if reasoning else text
    if prompt_ids is None or token_ids is None or logprobs is None:
        texts = {"tokens": tokens, "token_logprobs": logprobs or array("f"), **counts}
        return Reply(content, calls, raw, SampledTokens((), (), (), *labels, has_ids=False, extra=texts), reasoning)
    if len(token_ids) != len(logprobs):
        raise ServerError("bad_reply", f"the reply has {len(token_ids)} token ids and {len(logprobs)} log-probs")
    return Reply(content, calls, raw, SampledTokens(token_ids, logprobs, prompt_ids, *labels), reasoning)


def first_choice(body: Any) -> dict[str, Any]:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError("bad_reply", f"the reply has no choices: {str(body)[:80]!r}", retryable=True)
    return choices[0]


def _message(choice: dict[str, Any]) -> tuple[Message, str]:
    """The message, and the thoughts that a server with a reasoning parser returns separately."""
    value = choice.get("message")
    if not isinstance(value, dict):
        raise ServerError("bad_reply", "the reply has no choices[0].message", retryable=True)
    try:
        message = Message.model_validate({**value, "role": "assistant", "reasoning_content": None})
    except (ValidationError, RecursionError) as fault:
        reason = fault.errors()[0]["msg"] if isinstance(fault, ValidationError) else "nested too deeply"
        raise ServerError("bad_reply", f"choices[0].message is invalid: {reason}", retryable=True) from None
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    return message, reasoning if isinstance(reasoning, str) else ""


def _finish_reason(choice: dict[str, Any], has_calls: bool) -> FinishReason:
    reason = choice.get("finish_reason")
    if reason == "length":
        return "length"
    if reason in ("abort", "error"):  # the server gave up midway: not the model's decision
        raise ServerError("bad_reply", f"the server ended the reply with finish_reason {reason!r}", retryable=True)
    if reason == "content_filter":
        raise ServerError("refused", "the server's content filter blocked the reply")
    if isinstance(choice.get("stop_reason"), str):  # vLLM names the string; other servers do not tell it apart
        return "stop_string"
    return "tool_calls" if has_calls else "stop"


def _logprobs(choice: dict[str, Any]) -> tuple[list[str], array[float] | None]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if content is None:
        return [], None
    try:
        tokens = [str(entry["token"]) for entry in content]
        values = array("f", [float(entry["logprob"]) for entry in content])
    except (TypeError, KeyError, ValueError):
        raise ServerError("bad_reply", "choices[0].logprobs.content is not a list of tokens and log-probs") from None
    if any(math.isnan(value) for value in values):
        raise ServerError("bad_reply", "the reply has NaN log-probs: are the server's weights broken?")
    return tokens, values


def _token_ids(choice: dict[str, Any], tokens: Sequence[str]) -> array[int] | None:
    ids = parse_ids(choice.get("token_ids"), "token_ids")
    if ids is None and tokens and all(token.startswith(_TOKEN_ID) for token in tokens):
        numbers = [token.removeprefix(_TOKEN_ID) for token in tokens]  # vLLM's return_tokens_as_token_ids
        return parse_ids([int(n) if n.isascii() and n.isdigit() else n for n in numbers], "logprobs")
    return ids


def parse_ids(value: Any, name: str) -> array[int] | None:
    if value is None:
        return None
    valid = isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)
    if not valid:
        raise ServerError("bad_reply", f"{name} is not a list of token ids")
    return array("i", value)


def _token_counts(body: dict[str, Any]) -> dict[str, int]:
    """How many tokens the server read and sampled, if it says so."""
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {name: n for name in TOKEN_COUNTS if type(n := counts.get(name)) is int and 0 <= n < 2**31}


def _policy_version(body: dict[str, Any], headers: Mapping[str, str]) -> int:
    """Version of the weights that replied, if the server reports it, else 0."""
    version = body.get("policy_version", headers.get("x-policy-version"))
    text = str(version)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
