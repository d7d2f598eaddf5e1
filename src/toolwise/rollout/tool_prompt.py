"""How a model learns about its tools: through its chat template, or, if that ignores them, in the system message.

Many templates (SmolLM2's, the first Llama 3's, DeepSeek's) accept `tools` and write nothing about them. This is
detected by rendering; the tools are then described in the system message, with calls in the form that the run's parser
reads. Other templates show the tools but drop or reject calls and the role "tool": calls and results are then written
as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolwise.errors import ConfigError, ModelError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.call_format import EXAMPLE_CALL, CallFormat, find_format

ToolPromptMode = Literal["auto", "template", "system"]
Render = Callable[[Sequence[Message], Sequence[dict[str, Any]] | None], str]

HERMES = find_format("hermes")
_QUESTION = Message(role="user", content="question")
_SYSTEM = Message(role="system", content=f"system{secrets.token_hex(8)}")


class UserToolResult(Message):
    """A user message that holds a tool result. Like a message of role "tool", it cannot write tags."""


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """Where tools are described, and how calls and results are written in a conversation."""

    where: Literal["template", "system", "user", "nowhere"] = "template"
    """"user": before the first user message, for a template without a system role."""
    form: CallFormat = HERMES
    """The call format that is described."""
    calls_as_text: bool = False
    """The template drops calls: they are written into the assistant's text."""
    results_from_user: bool = False
    """The template drops or rejects tool results: they are written as user messages."""
    system_in_user: bool = False
    """The template has no system role: a system message is written at the start of the first user message."""
    reason: str = ""
    """What the template gets wrong, worded to follow "the chat template …"; "" if it just takes the tools."""
    usable: bool = True
    """False if the template drops or rejects calls or results however they are written."""

    def describe(self) -> str:
        text = {
            "template": "tools are shown by the chat template",
            "system": f"tools are shown in the system message, with calls in the format of the parser {self.form.name}",
            "user": f"tools are shown before the first user message, as the chat template has no system role, with "
            f"calls in the format of the parser {self.form.name}",
            "nowhere": f"the model does not see any tools: the chat template {self.reason or 'ignores tools'}",
        }[self.where]
        if self.where == "nowhere":
            return text
        if not self.usable:
            return f"{text}; tool calls do not work: the chat template {self.reason}"
        texts = ["calls as text"] * self.calls_as_text + ["results as user messages"] * self.results_from_user
        if texts:
            text = f"{text}; {' and '.join(texts)}"
        return f"{text} (the chat template {self.reason})" if self.reason else text

    def arrange(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        """The conversation as the template should get it; it starts the same in every turn."""
        arranged: list[Message] = []
        messages = _merge_system(messages) if self.system_in_user else messages
        for previous, message in zip([None, *messages], messages, strict=False):
            after_result = self.results_from_user and previous is not None and previous.role == "tool"
            if after_result and message.role in ("tool", "user"):  # a template may require alternating roles
                text = _result(message) if message.role == "tool" else message.content or ""
                arranged[-1] = arranged[-1].model_copy(update={"content": f"{arranged[-1].content}\n{text}"})
            else:
                arranged.append(self._convert_message(message))
        if not tools or self.where in ("template", "nowhere"):
            return arranged
        text, before_user = describe_tools(tools, self.form), self.where == "user"
        first = next((i for i, m in enumerate(arranged) if m.role == "user"), 0) if before_user else 0
        roles = ("user",) if before_user else ("system", "developer")
        if first < len(arranged) and arranged[first].role in roles:
            content = arranged[first].content or ""
            combined = f"{text}\n\n{content}" if before_user else f"{content}\n\n{text}"
            arranged[first] = arranged[first].model_copy(update={"content": combined.strip("\n")})
        else:
            arranged.insert(first, Message(role="user" if before_user else "system", content=text))
        return arranged

    def _convert_message(self, message: Message) -> Message:
        if self.calls_as_text and message.role == "assistant" and message.tool_calls and self.form.render:
            text = self.form.render(message.content or "", message.tool_calls)
            return message.model_copy(update={"content": text, "tool_calls": None})
        if self.results_from_user and message.role == "tool":
            return UserToolResult(role="user", content=_result(message))
        return message


def _merge_system(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation without its leading system message, whose text starts the first user message instead."""
    if not messages or messages[0].role not in ("system", "developer"):
        return messages
    system, *rest = messages
    first = next((i for i, message in enumerate(rest) if message.role == "user"), None)
    if first is None:
        return [Message(role="user", content=system.content), *rest]
    combined = "\n\n".join(text for text in (system.content, rest[first].content) if text)
    rest[first] = rest[first].model_copy(update={"content": combined})
    return rest


def shows_system(render: Render) -> bool:
    """Whether the template writes a system message."""
    return _find_missing(render, [_SYSTEM, _QUESTION], [_SYSTEM.content or ""]) is None


def _result(message: Message) -> str:
    return f"<tool_response>\n{message.content or ''}\n</tool_response>"


def describe_tools(tools: Sequence[dict[str, Any]], form: CallFormat) -> str:
    """The tools and how to call them; for hermes and qwen in the words of Qwen's own template."""
    specs = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if form.name in ("hermes", "qwen"):
        how = (
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    else:
        assert form.render is not None
        how = "To call a function, write its name and its arguments in exactly this form:\n"
        how += form.render("", [EXAMPLE_CALL])
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{specs}\n</tools>\n\n{how}"
    )


def choose_tool_prompt(render: Render, mode: ToolPromptMode, parser: CallFormat) -> ToolPrompt:
    """Apply `mode` to a template, found out by rendering. `render` is the bare template; `parser` is the run's, "auto"
    for one that inspects each text."""
    form = HERMES if parser.name == "auto" else parser
    reads_calls = form.render is not None
    hidden = _why_tools_hidden(render)
    if mode == "template":
        unchanged = ToolPrompt("template" if not hidden else "nowhere", reason=hidden)
        return unchanged if hidden or not reads_calls else _verify(render, unchanged)
    if not reads_calls:
        if mode == "system":
            raise ConfigError(
                f'rollout.tool_prompt is "system", but rollout.tool_parser "{parser.name}" does not read calls: '
                "choose one that does, such as hermes"
            )
        return ToolPrompt("nowhere" if hidden else "template", reason=hidden)
    if mode == "auto" and not hidden:
        style = _choose_call_style(render, ToolPrompt("template", form))
        if style.usable:
            return style
    where: Literal["system", "user"] = "system" if shows_system(render) else "user"
    return _choose_call_style(render, ToolPrompt(where, form, reason=hidden))


def _choose_call_style(render: Render, prompt: ToolPrompt) -> ToolPrompt:
    """`prompt` with as little written as text as the template needs to show calls and results."""
    unchanged = _verify(render, prompt)
    if unchanged.usable:
        return unchanged
    for calls, results in ((False, True), (True, False), (True, True)):
        changed = replace(prompt, calls_as_text=calls, results_from_user=results)
        if _verify(render, changed).usable:
            return replace(changed, reason=prompt.reason or unchanged.reason)
    return unchanged


def _verify(render: Render, prompt: ToolPrompt) -> ToolPrompt:
    """`prompt`, marked unusable with the reason if the template loses calls or tool results written this way."""
    call, value, result = (f"{kind}{secrets.token_hex(8)}" for kind in ("call", "value", "result"))
    spec = _spec(call)

    def turns(index: int) -> list[Message]:
        called = ToolCall(id=f"call_{index}", name=call, arguments={"x": value})
        return [
            Message(role="assistant", content="", tool_calls=[called]),
            Message(role="tool", content=result, tool_call_id=called.id, name=call),
        ]

    def lost(messages: Sequence[Message], expected: Sequence[str]) -> str | None:
        shown_by_template = [spec] if prompt.where == "template" else None
        return _find_missing(render, prompt.arrange(messages, [spec]), expected, shown_by_template)

    beginnings = [[_QUESTION], [_SYSTEM, _QUESTION]]
    for beginning in (talk for talk in beginnings if lost(talk, []) is None):  # a template may have no system role
        for talk in ([*beginning, *turns(0)], [*beginning, *turns(0), *turns(1)]):
            missing = lost(talk, [value, result])
            if missing is not None:
                reasons = {value: "leaves out tool calls", result: "leaves out tool results"}
                return replace(prompt, usable=False, reason=reasons.get(missing, f"fails on tool messages: {missing}"))
    return prompt


def _why_tools_hidden(render: Render) -> str:
    """Why the template does not write each tool and its parameters, whatever the conversation; "" if it does."""
    first, second, parameter = (f"{kind}{secrets.token_hex(8)}" for kind in ("tool", "tool", "parameter"))
    specs = [_spec(first), _spec(second, parameter)]
    longer = [_QUESTION, Message(role="assistant", content="answer"), _QUESTION]
    beginnings = ([_QUESTION], [_SYSTEM, _QUESTION], longer)  # a template may have no system role
    talks = [talk for talk in beginnings if _find_missing(render, talk, []) is None]
    for talk in talks:
        why = _find_missing(render, talk, [first, second, parameter], specs)
        if why == first:
            return "ignores tools" if talk is not longer else "ignores tools in longer conversations"
        if why is not None:
            left_out = {second: "shows the first tool only", parameter: "leaves out the parameters of tools"}
            return left_out.get(why, f"fails when given tools: {why}")
    return "" if talks else "ignores tools"


def _spec(name: str, parameter: str = "x") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string", "description": "probe"}}}
    return {"type": "function", "function": {"name": name, "description": "probe", "parameters": parameters}}


def _find_missing(
    render: Render,
    messages: Sequence[Message],
    words: Sequence[str],
    tools: Sequence[dict[str, Any]] | None = None,
) -> str | None:
    """The first of `words` that the template does not write, or the error it raises; None if it writes all."""
    try:
        text = render(messages, tools)
    except ModelError as fault:
        return " ".join(str(fault.__cause__ or fault).split()) or type(fault.__cause__).__name__
    return next((word for word in words if word not in text), None)
