"""How a model is told of its tools: by its chat template, or, where that ignores them, in the system message.

Many templates (SmolLM2's, the first Llama 3's, DeepSeek's) take `tools` and write nothing of them. Found out by
rendering; the tools then go into the system message, in the form of calls that the run's parser reads. Others show
the tools, but leave out or refuse calls and the role "tool": those are then written as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolwise.errors import ConfigError, ModelError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import RENDERERS

ToolPromptMode = Literal["auto", "template", "system"]
Render = Callable[[Sequence[Message], Sequence[dict[str, Any]] | None], str]

_QUESTION = Message(role="user", content="question")
_SYSTEM = Message(role="system", content=f"system{secrets.token_hex(8)}")


class UserToolResult(Message):
    """A user message that holds what a tool returned: it can write no tags, as a message of the role "tool" cannot."""


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
    reason: str = ""
    """What the template does wrong, after "the chat template …", where more is done than to hand it the tools."""
    usable: bool = True
    """False where the template leaves out, or refuses, calls or results however they are written."""

    def describe(self) -> str:
        told = self._describe_tools()
        if self.where == "nowhere":
            return told
        if not self.usable:
            return f"{told}; calls of tools do not work: the chat template {self.reason}"
        texts = ["calls as text"] * self.calls_as_text + ["results as user messages"] * self.results_from_user
        if texts:
            told = f"{told}; {' and '.join(texts)}"
        return f"{told} (the chat template {self.reason})" if self.reason else told

    def _describe_tools(self) -> str:
        return {
            "template": "tools are shown by the chat template",
            "system": f"tools are shown in the system message, with calls as the parser {self.form} reads them",
            "user": f"tools are shown before the first user message, as the chat template has no system role, with "
            f"calls as the parser {self.form} reads them",
            "nowhere": f"the model is not told of any tools: the chat template {self.reason or 'ignores tools'}",
        }[self.where]

    def arrange(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        """The conversation as the template is to have it; the same beginning in every turn."""
        told: list[Message] = []
        for before, message in zip([None, *messages], messages, strict=False):
            after_result = self.results_from_user and before is not None and before.role == "tool"
            if after_result and message.role in ("tool", "user"):  # a template may want the roles to alternate
                text = _result(message) if message.role == "tool" else message.content or ""
                told[-1] = told[-1].model_copy(update={"content": f"{told[-1].content}\n{text}"})
            else:
                told.append(self._convert_message(message))
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

    def _convert_message(self, message: Message) -> Message:
        if self.calls_as_text and message.role == "assistant" and message.tool_calls:
            text = RENDERERS[self.form](message.content or "", message.tool_calls)
            return message.model_copy(update={"content": text, "tool_calls": None})
        if self.results_from_user and message.role == "tool":
            return UserToolResult(role="user", content=_result(message))
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


def choose_tool_prompt(render: Render, mode: ToolPromptMode, parser: str) -> ToolPrompt:
    """What `mode` comes to for a template, seen by rendering. `render` is the template as it is; `parser` the run's,
    with "auto" for one that looks at each text."""
    form = "hermes" if parser == "auto" else parser
    reads_calls = form in RENDERERS and form != "action"
    hidden = _why_tools_hidden(render)
    if mode == "template":
        as_it_is = ToolPrompt("template" if not hidden else "nowhere", reason=hidden)
        return as_it_is if hidden or not reads_calls else _verify(render, as_it_is)
    if not reads_calls:
        if mode == "system":
            raise ConfigError(
                f'rollout.tool_prompt is "system", and rollout.tool_parser "{parser}" reads no calls: choose a parser '
                "that does, such as hermes"
            )
        return ToolPrompt("nowhere" if hidden else "template", reason=hidden)
    if mode == "auto" and not hidden:
        found = _choose_call_style(render, ToolPrompt("template", form))
        if found.usable:
            return found
    where: Literal["system", "user"] = (
        "system" if _find_missing(render, [_SYSTEM, _QUESTION], [_SYSTEM.content or ""]) is None else "user"
    )
    return _choose_call_style(render, ToolPrompt(where, form, reason=hidden))


def _choose_call_style(render: Render, prompt: ToolPrompt) -> ToolPrompt:
    """`prompt` with as little written as text as the template needs to show calls and results."""
    as_it_is = _verify(render, prompt)
    if as_it_is.usable:
        return as_it_is
    for calls, results in ((False, True), (True, False), (True, True)):
        changed = replace(prompt, calls_as_text=calls, results_from_user=results)
        if _verify(render, changed).usable:
            return replace(changed, reason=prompt.reason or as_it_is.reason)
    return as_it_is


def _verify(render: Render, prompt: ToolPrompt) -> ToolPrompt:
    """`prompt`, with the reason where the template loses calls, or what tools return, written in this way."""
    call, value, result = (f"{kind}{secrets.token_hex(8)}" for kind in ("call", "value", "result"))
    spec = _spec(call)

    def turns(place: int) -> list[Message]:
        called = ToolCall(id=f"call_{place}", name=call, arguments={"x": value})
        return [
            Message(role="assistant", content="", tool_calls=[called]),
            Message(role="tool", content=result, tool_call_id=called.id, name=call),
        ]

    def lost(messages: Sequence[Message], words: Sequence[str]) -> str | None:
        shown_by_template = [spec] if prompt.where == "template" else None
        return _find_missing(render, prompt.arrange(messages, [spec]), words, shown_by_template)

    beginnings = [[_QUESTION], [_SYSTEM, _QUESTION]]
    for start in (talk for talk in beginnings if lost(talk, []) is None):  # a template may have no system role
        for talk in ([*start, *turns(0)], [*start, *turns(0), *turns(1)]):
            why = lost(talk, [value, result])
            if why is not None:
                what = {value: "leaves out the calls of tools", result: "leaves out what tools return"}
                return replace(prompt, usable=False, reason=what.get(why, f"fails on the messages of tools: {why}"))
    return prompt


def _why_tools_hidden(render: Render) -> str:
    """Why the template does not write a tool's name, with a system message or without one; "" where it does."""
    name = f"tool{secrets.token_hex(8)}"
    talks = [talk for talk in ([_QUESTION], [_SYSTEM, _QUESTION]) if _find_missing(render, talk, []) is None]
    for talk in talks:  # a template may have no system role
        why = _find_missing(render, talk, [name], [_spec(name)])
        if why is not None:
            return "ignores tools" if why == name else f"fails when it is given tools: {why}"
    return "" if talks else "ignores tools"


def _spec(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "probe"}}}
    return {"type": "function", "function": {"name": name, "description": "probe", "parameters": parameters}}


def _find_missing(
    render: Render,
    messages: Sequence[Message],
    words: Sequence[str],
    tools: Sequence[dict[str, Any]] | None = None,
) -> str | None:
    """The first of `words` that the template does not write, or the message it raises; None where all is well."""
    try:
        text = render(messages, tools)
    except ModelError as fault:
        return " ".join(str(fault.__cause__ or fault).split()) or type(fault.__cause__).__name__
    return next((word for word in words if word not in text), None)
