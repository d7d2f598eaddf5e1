"""Parses and validates chat requests: options that would change the answer are applied or rejected, never ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from toolwise.config.imports import did_you_mean
from toolwise.errors import ToolwiseError
from toolwise.messages import Message
from toolwise.serve.json_body import read_json as read_json

INVALID_REQUEST = "invalid_request_error"
MAX_CHOICES = 128
MAX_MESSAGES = 20_000
MAX_TOOLS = 1_000
MAX_STOP_IDS = 256
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_TOP_LOGPROBS = 20
MAX_NEW_TOKENS = 1 << 31
MIN_TEMPERATURE = 1e-3
"""Smaller ones decode greedily in all but name, and the smallest let the logits overflow."""
_OWN_OPTIONS = ("budget", "route", "max_cost")
_WRAPPERS = ("extra_body", "toolwise")
"""Fields that clients put options into by mistake: the name of a client's argument, and that of the reply's field."""
_MAX_CHECKED_NAMES, _MAX_OPTION_CHARS = 100, 16

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": (),
    "reasoning_effort": (),
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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`close_connection`: close it because the boundary between this request and the next is uncertain."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.close_connection = close_connection
        self.headers = dict(headers or {})


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


class NamedTool(BaseModel):
    """`tool_choice` that names a tool."""

    name: str = Field(min_length=1)


def _read_tool_choice(value: Any) -> Any:
    if value in ("auto", "none", "required") or value is None:
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}')
    return NamedTool(name=function["name"])


def _read_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    stops = [stop for stop in stops if stop]
    if len(stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_CHARS} characters are allowed")
    return stops


def _read_response_format(value: Any) -> Any:
    """The JSON schema that a reply must follow; None for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = value.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise ValueError(
            'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": …}'
        )
    return schema


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = Field(default=False, strict=True)
    """Send usage in a last chunk, which has no choices."""


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions. Fields without effect here (user, metadata, …) are ignored."""

    model_config = ConfigDict(extra="ignore", strict=False)

    model: str = Field(max_length=512)
    messages: list[Annotated[Message, BeforeValidator(_unwrap_arguments)]] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    tools: list[ToolSpec] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, BeforeValidator(_read_tool_choice)] = None
    """"auto", "none" (the model sees the tools, but its output is returned as text), "required" or a `NamedTool`."""
    parallel_tool_calls: bool = Field(default=True, strict=True)
    temperature: float | None = Field(default=None, ge=0, le=100, strict=True)
    """0 is greedy decoding; log-probs are then computed at temperature 1."""
    top_p: float | None = Field(default=None, gt=0, le=1, strict=True)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31, strict=True)
    """-1 or 0: no limit."""
    max_tokens: int | None = Field(default=None, ge=1, lt=MAX_NEW_TOKENS, strict=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=MAX_NEW_TOKENS, strict=True)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, strict=True)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, strict=True)
    stop: Annotated[list[str], BeforeValidator(_read_stop)] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]] | None = Field(
        default=None, max_length=MAX_STOP_IDS
    )
    ignore_eos: bool = Field(default=False, strict=True)
    """Sample `max_tokens` tokens, past the end of the turn: for benchmarks."""
    response_format: Annotated[Any, BeforeValidator(_read_response_format)] = None
    """A JSON schema; None: text."""
    logprobs: bool = Field(default=False, strict=True)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS, strict=True)
    return_token_ids: bool = Field(default=False, strict=True)
    return_tokens_as_token_ids: bool = Field(default=False, strict=True)
    stream: bool = Field(default=False, strict=True)
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    budget: float | None = Field(default=None, ge=0, strict=True)
    """Mode agent: the mean cost per question; the router keeps to it."""
    route: str | None = Field(default=None, min_length=1, max_length=512)
    """Mode agent: overrides the router."""
    max_cost: float | None = Field(default=None, ge=0, strict=True)
    """Mode agent: the most that this answer may cost; calls beyond it are refused."""

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"must be 0, which is greedy, or at least {MIN_TEMPERATURE:g}")
        return value

    @model_validator(mode="after")
    def _check_choice(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.name!r:.80} in tools")
        if self.ignore_eos and (self.response_format is not None or self.tools):
            raise ValueError("ignore_eos: needs a reply of text, without tools and response_format")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    def changed_options(self) -> list[str]:
        """The given options that change the distribution or the form of a reply."""
        given = {
            "top_p": self.top_p not in (None, 1),
            "top_k": self.top_k not in (None, -1, 0),
            "stop": bool(self.stop),
            "response_format": self.response_format is not None,
            "top_logprobs": bool(self.top_logprobs),
            "tool_choice": self.tool_choice not in (None, "auto", "none"),
        }
        return [name for name, is_given in given.items() if is_given]


def unsupported(name: str, why: str) -> BadRequestError:
    return BadRequestError(f"{name} is not supported {why}", param=name, code="unsupported_parameter")


def _check_names(body: Mapping[str, Any]) -> None:
    """Refuse a misspelt limit on cost, which would not hold. Other unknown fields are some client's own."""
    unknown = [name for name in body if name not in ChatRequest.model_fields and len(name) <= _MAX_OPTION_CHARS]
    for name in unknown[:_MAX_CHECKED_NAMES]:
        if hint := did_you_mean(name, _OWN_OPTIONS):
            raise BadRequestError(f"there is no option {name}{hint}", param=name, code="unsupported_parameter")
    for name in _WRAPPERS:
        inside = body.get(name)
        if own := [option for option in _OWN_OPTIONS if isinstance(inside, dict) and option in inside]:
            told = f"{name}.{own[0]} is not an option: give {own[0]} as a field of the request itself"
            raise BadRequestError(told, param=name, code="unsupported_parameter")


def read_request(raw: bytes) -> ChatRequest:
    try:
        value = read_json(raw)
    except ValueError as fault:
        raise BadRequestError(f"cannot read the JSON body: {fault}") from None
    if not isinstance(value, dict):
        raise BadRequestError("the body must be a JSON object with model and messages")
    for name, neutral in _NEUTRAL_VALUES.items():
        if value.get(name) is not None and value[name] not in neutral:
            hint = f"omit it, or use {json.dumps(neutral[0])}" if neutral else "omit it"
            raise BadRequestError(f"{name} is not supported: {hint}", param=name, code="unsupported_parameter")
    _check_names(value)
    try:
        return ChatRequest.model_validate({name: field for name, field in value.items() if field is not None})
    except ValidationError as fault:
        first = fault.errors()[0]
        where, message = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        if not where:  # of the request as a whole: the message starts with the field
            where, _, message = message.partition(": ")
        raise BadRequestError(f"{where}: {message}", param=where) from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None
