"""Parses and validates chat requests. Options that would change the answer are applied or rejected, never ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from toolwise.errors import ToolwiseError
from toolwise.messages import Message
from toolwise.serve.json_body import read_json

MAX_CHOICES = 128
MAX_MESSAGES = 20_000
MAX_TOOLS = 1_000
MAX_STOP_IDS = 256
MAX_NEW_TOKENS = 1 << 31

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
"""Unsupported options that change the distribution or the text, with values that have no effect (None never has)."""


class BadRequestError(ToolwiseError):
    """An invalid request; becomes an OpenAI error object."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        close_connection: bool = False,
    ) -> None:
        """`close_connection`: close it because the boundary between this request and the next is uncertain."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.close_connection = close_connection


class FunctionSpec(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolSpec(BaseModel):
    """An offered tool. Unknown fields are kept, since the chat template may use them."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionSpec


def _unwrap_arguments(value: Any) -> Any:
    """Arguments that were not a JSON object arrive as a JSON string; unwrap it so the template writes the original."""
    if not isinstance(value, dict) or not isinstance(value.get("tool_calls"), list):
        return value
    return {**value, "tool_calls": [_unwrap_call(call) for call in value["tool_calls"]]}


def _unwrap_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not str(function.get("arguments")).startswith('"'):
        return call
    try:
        text = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": text}}


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions. Fields without effect here (user, metadata, …) are ignored."""

    model_config = ConfigDict(extra="ignore", strict=False)

    model: str = Field(max_length=512)
    messages: list[Annotated[Message, BeforeValidator(_unwrap_arguments)]] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    tools: list[ToolSpec] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none"] | None = None
    """none: the model sees the tools, but its output is returned as text."""
    temperature: float | None = Field(default=None, ge=0, le=100, strict=True)
    """0 is greedy decoding; log-probs are then computed at temperature 1."""
    max_tokens: int | None = Field(default=None, ge=1, lt=MAX_NEW_TOKENS, strict=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=MAX_NEW_TOKENS, strict=True)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, strict=True)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, strict=True)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]] | None = Field(
        default=None, max_length=MAX_STOP_IDS
    )
    logprobs: bool = Field(default=False, strict=True)
    return_token_ids: bool = Field(default=False, strict=True)
    return_tokens_as_token_ids: bool = Field(default=False, strict=True)
    stream: bool = Field(default=False, strict=True)


def read_request(raw: bytes) -> ChatRequest:
    try:
        value = read_json(raw)
    except ValueError as fault:
        raise BadRequestError(f"cannot read the JSON body: {fault}") from None
    if not isinstance(value, dict):
        raise BadRequestError("the body must be a JSON object with model and messages")
    _check_unsupported(value)
    try:
        return ChatRequest.model_validate({name: field for name, field in value.items() if field is not None})
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequestError(f"{where}: {first['msg']}", param=where) from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def _check_unsupported(value: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        option = value.get(name)
        if option is not None and option not in neutral:
            raise BadRequestError(
                f"{name} is not supported: omit it, or use {json.dumps(neutral[0])}",
                param=name,
                code="unsupported_parameter",
            )
