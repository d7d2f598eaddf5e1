"""Requests and responses of the gateway: chat completions, and vLLM's generation from token ids.

Sampling is the run's, since log-probs must be those of the policy that is trained. `temperature` and `seed` are
replaced by the run's without a word; whatever else would reshape the distribution is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolwise.messages import Message
from toolwise.rollout.agents.recorded_call import CallOptions, RecordedCall
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve.json_body import read_json
from toolwise.serve.request import BadRequestError, ToolSpec

MAX_MESSAGES = 20_000
MAX_TOOLS = 1_000
MAX_STOPS = 256
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""What would make the recorded log-probs those of another policy, or is not supported, with the values that are no
request for it (None never is)."""

Call = TypeVar("Call", bound=BaseModel)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]


class ChatCall(BaseModel):
    """The body of a chat completion. Other fields have no effect here and are ignored."""

    model_config = ConfigDict(extra="ignore")

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = Field(default="", max_length=512)
    tools: list[ToolSpec] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def options(self) -> CallOptions:
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(words) > MAX_STOPS:
            raise BadRequestError(f"stop has {len(words)} strings: give at most {MAX_STOPS}", param="stop")
        return CallOptions(
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(word for word in words if word),
            reads_calls=self.tool_choice != "none",
        )


class SamplingParams(BaseModel):
    """vLLM's sampling parameters, of which the run's own replace those that would change the distribution."""

    model_config = ConfigDict(extra="ignore")

    max_tokens: int | None = Field(default=None, ge=1)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOPS)


class GenerateCall(BaseModel):
    """The body of POST /inference/v1/generate."""

    model_config = ConfigDict(extra="ignore")

    token_ids: list[TokenId] = Field(min_length=1)
    model: str = ""
    sampling_params: SamplingParams = SamplingParams()

    @property
    def options(self) -> CallOptions:
        params = self.sampling_params
        return CallOptions(max_new_tokens=params.max_tokens, stop_token_ids=tuple(params.stop_token_ids or ()))


def read_chat_call(raw: bytes) -> ChatCall:
    value = _read_object(raw)
    _refuse_biased(value)
    return _validated(ChatCall, value)


def read_generate_call(raw: bytes) -> GenerateCall:
    value = _read_object(raw)
    params = value.get("sampling_params")
    _refuse_biased(params if isinstance(params, dict) else {})
    for name in ("features", "content_parts"):
        if value.get(name):
            raise BadRequestError(f"{name} is not supported: send text as token_ids", param=name)
    return _validated(GenerateCall, value)


def check_vocabulary(call: GenerateCall, size: int) -> None:
    if (largest := max(call.token_ids)) >= size:
        raise BadRequestError(f"token id {largest} is not in the vocabulary of {size} tokens", param="token_ids")


def _read_object(raw: bytes) -> dict[str, Any]:
    try:
        value = read_json(raw)
    except ValueError as fault:
        raise BadRequestError(f"cannot read the JSON body: {fault}") from None
    if not isinstance(value, dict):
        raise BadRequestError("the body must be a JSON object")
    return value


def _refuse_biased(value: Mapping[str, Any]) -> None:
    for name, neutral in REFUSED.items():
        if value.get(name) is not None and value[name] not in neutral:
            hint = f"omit it, or use {json.dumps(neutral[0])}"
            text = f"{name} is not supported while a model is trained: {hint}"
            raise BadRequestError(text, param=name, code="unsupported_parameter")


def _validated(kind: type[Call], value: dict[str, Any]) -> Call:
    try:
        return kind.model_validate({name: field for name, field in value.items() if field is not None})
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequestError(f"{where}: {first['msg']}", param=where) from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def chat_answer(request: ChatCall, call: RecordedCall, model: str, tokens: Sequence[str]) -> dict[str, Any]:
    """The response. `tokens`: the text of each sampled token."""
    reply, sampled = call.reply, call.tokens
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if reply.reasoning_content:
        message["reasoning_content"] = reply.reasoning_content
    if reply.tool_calls:
        pairs = zip(reply.tool_calls, call.public_ids, strict=True)
        message["tool_calls"] = [{**made.to_openai(), "id": public_id} for made, public_id in pairs]
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": sampled.finish_reason,
        "logprobs": {"content": logprob_entries(call, tokens)} if request.logprobs else None,
    }
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice | ({"token_ids": list(sampled.token_ids)} if request.return_token_ids else {})],
        "usage": call_usage(call),
        "policy_version": sampled.policy_version,
        **({"prompt_token_ids": list(sampled.prompt_ids)} if request.return_token_ids else {}),
    }


def generate_answer(call: RecordedCall) -> dict[str, Any]:
    """The response of POST /inference/v1/generate."""
    sampled = call.tokens
    tokens = [f"token_id:{token}" for token in sampled.token_ids]
    choice = {
        "index": 0,
        "logprobs": {"content": logprob_entries(call, tokens)},
        "finish_reason": sampled.finish_reason,
        "token_ids": list(sampled.token_ids),
    }
    return {"request_id": f"generate-{uuid4().hex}", "choices": [choice], "usage": call_usage(call)}


def token_texts(request: ChatCall, call: RecordedCall, chat: ChatTokenizer) -> list[str]:
    """The text of each sampled token, or its id, if the client asks for log-probs."""
    if not request.logprobs:
        return []
    if request.return_tokens_as_token_ids:
        return [f"token_id:{token}" for token in call.tokens.token_ids]
    return [chat.decode([token, chat.end_id]) for token in call.tokens.token_ids]  # which strips a final end token


def logprob_entries(call: RecordedCall, tokens: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
        for token, logprob in zip(tokens, call.tokens.logprobs, strict=True)
    ]


def call_usage(call: RecordedCall) -> dict[str, int]:
    seen, sampled = len(call.tokens.prompt_ids), len(call.tokens.token_ids)
    return {"prompt_tokens": seen, "completion_tokens": sampled, "total_tokens": seen + sampled}
