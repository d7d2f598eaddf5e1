"""Grammars for replies: `response_format`, `tool_choice` and strict tools, compiled once per schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.text_threads import run_in_thread
from toolwise.errors import MissingExtraError, PolicyError
from toolwise.rollout.call_format import CallFormat
from toolwise.rollout.parsers import PARSERS
from toolwise.serve.request import BadRequestError, ChatRequest, NamedTool, unsupported

if TYPE_CHECKING:
    from toolwise.engine.grammar import Constraint, Grammar, Vocabulary
    from toolwise.policies.local import LocalPolicy

MAX_SCHEMA_CHARS = 64_000
MAX_SUBSCHEMAS = 1_000
"""JSON objects in the schemas of a request: each subschema is one."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="toolwise-serve-grammar")
"""Requests without a grammar do not wait for it."""


@dataclass(slots=True)
class ReplyConstraints:
    """The constraints of a model's replies. The tokenizer's tables are built at the first request that needs them."""

    policy: LocalPolicy
    call_format: CallFormat
    _vocabulary: Vocabulary | None = field(default=None, init=False)

    @property
    def stream_interval_s(self) -> float:
        """How long the engine collects the tokens of a stream."""
        from toolwise.engine import Engine

        engine = self.policy.engine
        return engine.streams.interval_s if isinstance(engine, Engine) else 0.0

    async def of(self, request: ChatRequest) -> Constraint | None:
        """The constraint on the reply to a request, if any; compiled in a thread of its own, as it may take seconds.
        One that was compiled before does not wait for it."""
        param = asks_for_grammar(request)
        if param is None:
            return None
        grammar = await run_in_thread(self._grammar, param, request)
        if self._vocabulary is not None and self._vocabulary.is_compiled(grammar):
            return self._compile(param, grammar)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, self._compile, param, grammar)

    def check_stops(self, stop_token_ids: Sequence[int]) -> None:
        """Raise if a token is not in the model's vocabulary."""
        size = self.policy.vocabulary
        if max(stop_token_ids, default=0) >= size:
            raise BadRequestError(
                f"stop_token_ids: {max(stop_token_ids)} is not in the model's vocabulary of {size}",
                param="stop_token_ids",
            )

    def _compile(self, param: str, grammar: Grammar) -> Constraint:
        try:
            if self._vocabulary is None:
                from toolwise.engine.grammar import Vocabulary

                self._vocabulary = Vocabulary(self.policy.chat.tokenizer, self.policy.vocabulary)
            return self._vocabulary.compile(grammar)
        except MissingExtraError as missing:
            raise unsupported(param, f"by this server: {missing}") from missing
        except PolicyError as fault:
            raise BadRequestError(f"{param}: {fault}", param=param) from fault

    def _grammar(self, param: str, request: ChatRequest) -> Grammar:
        from toolwise.engine.grammar import Grammar
        from toolwise.policies.call_grammar import calls_grammar

        choice, schema = request.tool_choice, request.response_format
        tools = () if choice == "none" else offered_tools(request)
        check_schemas(param, [*([] if schema is None else [schema]), *(tool["function"] for tool in tools)])
        if not tools:
            assert schema is not None
            return Grammar.json_schema(schema, "the schema")
        required = _is_required(request)
        if self.call_format.parse is not PARSERS["hermes"]:
            raise unsupported(param, f"with tools: the model calls tools in the format {self.call_format.name}")
        return calls_grammar(
            self.policy.chat.tokenizer,
            tools,
            required=required,
            parallel=request.parallel_tool_calls,
            answer=None if required else schema,
        )


def asks_for_grammar(request: ChatRequest) -> str | None:
    """The field that asks for a grammar, if any."""
    by_schema = None if request.response_format is None else "response_format"
    if request.tool_choice == "none" or not request.tools:
        return by_schema
    if _is_required(request):
        return "tool_choice"
    strict = any((tool.function.model_extra or {}).get("strict") is True for tool in request.tools)
    return "tools" if strict else by_schema


def _is_required(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def check_schemas(param: str, schemas: Sequence[Any]) -> None:
    """Raise if the schemas of a grammar are too large together: compiling takes the longer the larger they are."""
    size = sum(len(json.dumps(schema, ensure_ascii=False)) for schema in schemas)
    if size > MAX_SCHEMA_CHARS:
        raise BadRequestError(
            f"{param}: schemas of {size} characters are too large, at most {MAX_SCHEMA_CHARS} are allowed", param=param
        )
    parts, left = 0, list(schemas)
    while left:
        value = left.pop()
        parts += isinstance(value, dict)
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if parts > MAX_SUBSCHEMAS:
        raise BadRequestError(
            f"{param}: schemas of {parts} JSON objects are too large, at most {MAX_SUBSCHEMAS} are allowed", param=param
        )


def offered_tools(request: ChatRequest) -> Sequence[dict[str, Any]]:
    """The tools that a reply may call: all, or the named one."""
    specs = tool_specs(request)
    if isinstance(request.tool_choice, NamedTool):
        return [spec for spec in specs if spec["function"]["name"] == request.tool_choice.name]
    return specs


def tool_specs(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
