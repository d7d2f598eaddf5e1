"""How a model is told of its tools: by its chat template, or, where that ignores them, in the system message.

Many templates (SmolLM2's, the first Llama 3's, DeepSeek's) take `tools` and write nothing of them. Found out by
rendering; the tools then go into the system message, in the form of calls that the run's parser reads.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolwise.errors import ConfigError, ModelError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import RENDERERS

Mode = Literal["auto", "template", "system"]
Render = Callable[[Sequence[Message], Sequence[dict[str, Any]] | None], str]

_QUESTION = Message(role="user", content="question")
_SYSTEM = Message(role="system", content="system")


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """Where tools are told, and how calls and results stand in a conversation."""

    where: Literal["template", "system", "user", "nowhere"] = "template"
    """"user": before the first user message, for a template without a system role."""
    form: str = "hermes"
    """The parser whose form of calls is described."""
    calls_as_text: bool = False
    """The template leaves out calls: they are written into the assistant's text."""
    results_from_user: bool = False
    """The template leaves out, or refuses, what tools return: it is written as a user message."""

    def describe(self) -> str:
        return {
            "template": "tools are shown by the chat template",
            "system": f"tools are shown in the system message, with calls as the parser {self.form} reads them",
            "user": f"tools are shown before the first user message, as the chat template has no system role, with "
            f"calls as the parser {self.form} reads them",
            "nowhere": "the model is not told of any tools: the chat template ignores them",
        }[self.where]

    def arrange(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        """The conversation as the template is to have it; the same beginning in every turn."""
        told: list[Message] = []
        for before, message in zip([None, *messages], messages, strict=False):
            if self.results_from_user and message.role == "tool" and before is not None and before.role == "tool":
                whole = f"{told[-1].content}\n{_result(message)}"  # a template may want the roles to alternate
                told[-1] = told[-1].model_copy(update={"content": whole})
            else:
                told.append(self._told(message))
        if not tools or self.where in ("template", "nowhere"):
            return told
        text, roles = describe_tools(tools, self.form), ("system", "developer")
        if self.where == "user":
            first = next((i for i, m in enumerate(told) if m.role == "user"), 0)
            role: Any = "user"
        else:
            first, role = 0, "system"
        if first < len(told) and (told[first].role in roles if role == "system" else told[first].role == "user"):
            own = told[first].content or ""
            whole = f"{own}\n\n{text}" if role == "system" else f"{text}\n\n{own}"
            told[first] = told[first].model_copy(update={"content": whole.strip("\n")})
        else:
            told.insert(first, Message(role=role, content=text))
        return told

    def _told(self, message: Message) -> Message:
        if self.calls_as_text and message.role == "assistant" and message.tool_calls:
            text = RENDERERS[self.form](message.content or "", message.tool_calls)
            return message.model_copy(update={"content": text, "tool_calls": None})
        if self.results_from_user and message.role == "tool":
            return Message(role="user", content=_result(message))
        return message


def _result(message: Message) -> str:
    return f"<tool_response>\n{message.content or ''}\n</tool_response>"


def describe_tools(tools: Sequence[dict[str, Any]], form: str) -> str:
    """The tools and how to call them. For hermes and qwen in the words that Qwen's own template has."""
    specs = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if form in ("hermes", "qwen"):
        how = (
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    else:
        example = ToolCall(id="call_0", name="function-name", arguments={"argument-name": "value"})
        how = f"To call a function, write its name and its arguments in exactly this form:\n{_example(form, example)}"
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{specs}\n</tools>\n\n{how}"
    )


def _example(form: str, call: ToolCall) -> str:
    return RENDERERS[form]("", [call])


def choose_tool_prompt(render: Render, mode: Mode, parser: str, name: str) -> ToolPrompt:
    """What `mode` comes to for a template, seen by rendering. `parser`: the run's, with "auto" for one that looks at
    each text; `name`: the model's, for messages."""
    form = "hermes" if parser == "auto" else parser
    reads_calls = form in RENDERERS and form != "action"
    shows = shows_tools(render)
    if mode == "template" or (mode == "auto" and shows):
        return ToolPrompt("template" if shows else "nowhere")
    if not reads_calls:
        if mode == "system":
            raise ConfigError(
                f'rollout.tool_prompt is "system", and rollout.tool_parser "{parser}" reads no calls: choose a parser '
                "that does, such as hermes"
            )
        return ToolPrompt("nowhere")
    where: Literal["system", "user"] = "system" if _keeps(render, [_SYSTEM, _QUESTION], "system") else "user"
    calls, results = _kept_calls(render)
    return ToolPrompt(where, form, calls_as_text=not calls, results_from_user=not results)


def shows_tools(render: Render) -> bool:
    """Whether the template writes a tool's name, with a system message and without one."""
    name = f"tool{secrets.token_hex(8)}"
    spec = {
        "type": "function",
        "function": {"name": name, "description": "probe", "parameters": {"type": "object", "properties": {}}},
    }
    shown = [
        _keeps(render, messages, name, [spec])
        for messages in ([_QUESTION], [_SYSTEM, _QUESTION])
        if _keeps(render, messages, "")  # a template may have no system role
    ]
    return bool(shown) and all(shown)


def _kept_calls(render: Render) -> tuple[bool, bool]:
    """Whether the template writes an assistant's calls, and what a tool returned."""
    name, result = f"call{secrets.token_hex(8)}", f"result{secrets.token_hex(8)}"
    call = Message(role="assistant", content="", tool_calls=[ToolCall(id="call_0", name=name, arguments={"x": 1})])
    answered = [
        _QUESTION,
        Message(role="assistant", content="reply"),
        Message(role="tool", content=result, tool_call_id="call_0", name="tool"),
    ]
    return _keeps(render, [_QUESTION, call], name), _keeps(render, answered, result) or _keeps(
        render, [_QUESTION, call, answered[2]], result
    )


def _keeps(
    render: Render, messages: Sequence[Message], word: str, tools: Sequence[dict[str, Any]] | None = None
) -> bool:
    try:
        return word in render(messages, tools)
    except ModelError:
        return False
