"""Parses and validates chat requests: depth and size of the JSON are checked before any object is created, options
that would change the answer are applied or rejected, never ignored."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from toolwise.errors import ToolwiseError
from toolwise.messages import Message

MAX_JSON_TOKENS = 250_000
"""Strings, brackets and commas per body. A string counts as one, whatever its length."""
MAX_DEPTH = 64

# The closing quote is optional: a failed match would be retried from every quote inside the string.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[][{},]', re.DOTALL)

INVALID_REQUEST = "invalid_request_error"
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


def error_body(
    message: str, kind: str = INVALID_REQUEST, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error in the OpenAI format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
    if isinstance(function, dict) and str(function.get("arguments")).startswith('"'):
        with suppress(ValueError):
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


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
    for name, neutral in _NEUTRAL_VALUES.items():
        if value.get(name) is not None and value[name] not in neutral:
            hint = f"omit it, or use {json.dumps(neutral[0])}"
            raise BadRequestError(f"{name} is not supported: {hint}", param=name, code="unsupported_parameter")
    try:
        return ChatRequest.model_validate({name: field for name, field in value.items() if field is not None})
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequestError(f"{where}: {first['msg']}", param=where) from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def read_json(raw: bytes) -> Any:
    """Parse `raw`. Raises a one-line ValueError if it is not JSON, too deep or too large."""
    _check_structure(raw)
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_read_float)
        if "\\u" in text:  # a lone surrogate, possible only as an escape, cannot be tokenised
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as fault:
        raise ValueError((str(fault).splitlines() or [type(fault).__name__])[0]) from None
    return value


def _check_structure(raw: bytes) -> None:
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(raw), 1):
        if count > MAX_JSON_TOKENS:
            raise ValueError(f"more than {MAX_JSON_TOKENS} strings, brackets and commas")
        first = raw[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested too deeply: at most {MAX_DEPTH} levels are allowed")
        elif first in b"]}":
            depth -= 1


def _read_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is too large for a number")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
