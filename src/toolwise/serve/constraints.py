"""Grammars for replies: `response_format`, `tool_choice` and strict tools, compiled once per schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.errors import MissingExtraError, PolicyError
from toolwise.rollout.call_format import CallFormat
from toolwise.rollout.parsers import PARSERS
from toolwise.serve.request import BadRequestError, ChatRequest, NamedTool, unsupported

if TYPE_CHECKING:
    from toolwise.engine.grammar import Constraint, Grammar, Vocabulary
    from toolwise.policies.local import LocalPolicy


@dataclass(slots=True)
class ReplyConstraints:
    """The constraints of a model's replies. The tokenizer's tables are built at the first request that needs them."""

    policy: LocalPolicy
    call_format: CallFormat
    _vocabulary: Vocabulary | None = field(default=None, init=False)

    def of(self, request: ChatRequest) -> Constraint | None:
        """The constraint on the reply to a request, if any. May take seconds: do not call it in an event loop."""
        param, grammar = self._grammar(request)
        if grammar is None:
            return None
        try:
            if self._vocabulary is None:
                from toolwise.engine.grammar import Vocabulary

                self._vocabulary = Vocabulary(self.policy.chat.tokenizer, self.policy.vocabulary)
            return self._vocabulary.compile(grammar)
        except MissingExtraError as missing:
            raise unsupported(param, f"by this server: {missing}") from missing
        except PolicyError as fault:
            raise BadRequestError(f"{param}: {fault}", param=param) from fault

    def _grammar(self, request: ChatRequest) -> tuple[str, Grammar | None]:
        """The field that asks for a grammar, and the grammar."""
        from toolwise.engine.grammar import Grammar
        from toolwise.policies.call_grammar import calls_grammar

        choice, schema = request.tool_choice, request.response_format
        tools = offered_tools(request)
        if choice == "none" or not tools:
            return "response_format", None if schema is None else Grammar.json_schema(schema, "the schema")
        required = choice == "required" or isinstance(choice, NamedTool)
        strict = any(tool["function"].get("strict") is True for tool in tools)
        if not (required or strict or schema is not None):
            return "tool_choice", None
        param = "tool_choice" if required else "tools" if strict else "response_format"
        if self.call_format.parse is not PARSERS["hermes"]:
            raise unsupported(param, f"with tools: the model calls tools in the format {self.call_format.name}")
        return param, calls_grammar(
            self.policy.chat.tokenizer,
            tools,
            required=required,
            parallel=request.parallel_tool_calls,
            answer=None if required else schema,
        )


def offered_tools(request: ChatRequest) -> Sequence[dict[str, Any]]:
    """The tools that a reply may call: all, or the named one."""
    specs = tool_specs(request)
    if isinstance(request.tool_choice, NamedTool):
        return [spec for spec in specs if spec["function"]["name"] == request.tool_choice.name]
    return specs


def tool_specs(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
