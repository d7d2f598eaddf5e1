"""What a model's tokenizer and chat template tell: where turns end, how tools are shown, how calls are written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError, ModelError, ToolwiseError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.call_format import CallFormat, ParserSpec, find_format
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.rollout.tokens import TokenBuffer
from toolwise.tools.base import BaseTool
from toolwise.types.findings import Finding

log = logging.getLogger("toolwise.training")

QUESTION = Message(role="user", content="Multiply 12 by 7.")
RESULT = "84"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def open_chat(config: RunConfig, parser: ParserSpec | None = None) -> tuple[ChatTokenizer, CallFormat]:
    """The model's tokenizer and the format of its calls, without its weights."""
    from toolwise.models import load_chat

    model = config.model
    chat = load_chat(
        model.path,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        base=model.base,
        chat_template=model.chat_template,
        template_kwargs=model.template_kwargs,
    )
    form = chat.find_format(config.rollout.tool_parser if parser is None else parser)
    chat.set_tool_prompt(config.rollout.tool_prompt, form)
    return chat, form


def check_tool_prompt(config: RunConfig, chat: ChatTokenizer) -> None:
    """Log how tools are presented to the model; raise if its template cannot show tools, calls or results."""
    prompt = chat.tool_prompt
    if prompt.where == "nowhere":
        raise ConfigError(
            f"the chat template of {chat.name} {prompt.reason}, and rollout.tool_prompt = "
            f'"{config.rollout.tool_prompt}" with rollout.tool_parser = "{config.rollout.tool_parser}" does not show '
            'them either: use tool_prompt = "auto" and a parser that reads and writes calls, such as hermes, or a '
            "toolwise.ToolCallParser with render"
        )
    if not prompt.usable:
        raise ConfigError(
            f"the chat template of {chat.name} {prompt.reason}: "
            + (
                'use rollout.tool_prompt = "auto", which writes them as text if it can'
                if config.rollout.tool_prompt == "template"
                else "they are lost even when written as text, so tools cannot be used: use another chat template"
            )
        )
    log.info("%s", prompt.describe())


def show_prompt(chat: ChatTokenizer, tools: Mapping[str, BaseTool]) -> str:
    """What the model sees before its first reply."""
    return strip_guard_marks(chat.render([QUESTION], tool_specs(tools)))


def chat_findings(
    chat: ChatTokenizer, config: RunConfig, form: CallFormat, tools: Mapping[str, BaseTool]
) -> list[Finding]:
    """What the tokenizer and the chat template alone tell."""
    return [
        _turn_ends(chat),
        _parser(chat, config, form),
        _tool_prompt(chat, tools),
        _tool_names(chat, form, tools),
        _round_trip(chat, form),
        _turns(chat, tools, config.rollout.on_template_change),
        _control_tokens(chat),
    ]


def _turn_ends(chat: ChatTokenizer) -> Finding:
    ends, opening = chat.turn_ends, _opening(chat)
    written = ", ".join(ends.ends) or f"the opening of the next message ({', '.join(ends.openings)})"
    says = f"generation stops at {', '.join(ends.stops)}; in a conversation a reply ends with {written}"
    thought = f"; the prompt ends in {opening!r}, so replies start inside a thought" if "<think>" in opening else ""
    figures = {"stop_ids": list(chat.stop_ids)}
    cures = []
    if chat.unknown_eos_ids:
        ids = ", ".join(chat.unknown_eos_ids[:8])
        says += f"; eos_token_id of its settings also names {ids}, outside the vocabulary of {len(chat.tokenizer):,}"
        cures.append("correct generation_config.json, or use the tokenizer that the model was trained with")
    if chat.ordinary_stop_ids:
        named = ", ".join(f"{i} ({chat.tokenizer.decode([i])!r:.40})" for i in chat.ordinary_stop_ids[:8])
        says += f"; eos_token_id of its settings also names tokens of ordinary text, at which replies are cut: {named}"
        cures.append("remove them from eos_token_id in generation_config.json, or flag them as special tokens")
    return Finding("turn end", "warning" if cures else "ok", says + thought, figures, cure="; ".join(cures))


def _opening(chat: ChatTokenizer) -> str:
    """What the template writes to open a reply."""
    closed = chat.render([QUESTION], generation_prompt=False)
    text = chat.render([QUESTION])
    return strip_guard_marks(text.removeprefix(closed))


def _parser(chat: ChatTokenizer, config: RunConfig, form: CallFormat) -> Finding:
    why = f'rollout.tool_parser = "{config.rollout.tool_parser}"'
    if config.rollout.tool_parser == "auto":
        why = chat.detect_format().why
    return Finding("parser", "ok", f"{form.name}: {why}")


def _tool_prompt(chat: ChatTokenizer, tools: Mapping[str, BaseTool]) -> Finding:
    prompt = chat.tool_prompt
    if prompt.where == "nowhere" or not prompt.usable:
        cure = 'use rollout.tool_prompt = "auto" and a parser that reads calls, or another model.chat_template'
        return Finding("tools", "wrong" if tools else "warning", prompt.describe(), cure=cure)
    return Finding("tools", "ok", prompt.describe())


def _tool_names(chat: ChatTokenizer, form: CallFormat, tools: Mapping[str, BaseTool]) -> Finding:
    """Whether the format can carry the names of the tools and of their parameters."""
    name, cure = "tool names", "rename it: letters, digits, underscores and hyphens work in every format"
    render = form.render or (find_format("hermes").render if form.name == "auto" else None)
    if render is None:
        return Finding(name, "skipped", f"the parser {form.name} does not write calls")
    for spec in tool_specs(tools):
        function = spec["function"]
        keys = [*(function["parameters"].get("properties") or {})]
        # Two, so that a name that starts or ends a call shows.
        calls = [ToolCall(id=f"call_{i}", name=function["name"], arguments=dict.fromkeys(keys, "x")) for i in range(2)]
        try:
            content, found = form.parse_for(render("", calls), [spec])
        except ToolwiseError as fault:
            return Finding(
                name, "wrong", f"the parser {form.name} fails on {function['name']!r:.80}: {fault}", cure=cure
            )
        if content.strip() or [(c.name, c.arguments) for c in found] != [(c.name, c.arguments) for c in calls]:
            odd = f"the tool {function['name']!r:.80}"
            if [c.name for c in found] == [c.name for c in calls] and keys:
                odd = f"the parameters {', '.join(map(repr, keys))[:120]} of {odd}"
            says = f"calls in the format {form.name} cannot carry {odd}"
            # A parser of one's own may read one call per reply.
            return Finding(name, "warning" if ":" in form.name else "wrong", says, cure=cure)
    return Finding(name, "ok", f"the format {form.name} carries {', '.join(tools) or 'any plain name'}"[:200])


def _round_trip(chat: ChatTokenizer, form: CallFormat) -> Finding:
    """Write a call as the model sees calls in its history, and read it as the model's own text would be read."""
    name, cure = "round trip", "set rollout.tool_parser to the format in which this model calls tools"
    call = ToolCall(id="call_0", name="look_up", arguments={"word": 'a "quoted" word, 字'})
    if form.render is None and form.name != "auto":
        return Finding(name, "skipped", f"the parser {form.name} does not write calls")
    try:
        text = _write_call(chat, form, call)
        _, calls = form.parse(text)
    except ToolwiseError as fault:
        return Finding(name, "warning", f"the chat template does not write a call that can be read: {fault}", cure=cure)
    if [(c.name, c.arguments) for c in calls] == [(call.name, call.arguments)]:
        return Finding(name, "ok", f"the parser {form.name} reads a call as the conversation shows it: {text!r:.200}")
    says = f"the parser {form.name} does not read a call as the conversation shows it: {text!r:.200}"
    return Finding(name, "warning", says, cure=cure)


def _write_call(chat: ChatTokenizer, form: CallFormat, call: ToolCall) -> str:
    if chat.tool_prompt.calls_as_text and form.render is not None:
        return form.render("", [call])
    try:
        return chat.decode(chat.reply(Message(role="assistant", content="", tool_calls=[call]), [PROBE_TOOL]))
    except ModelError:  # the prompt opens a thought, which the template leaves out of earlier turns
        if form.render is None:
            raise
        return form.render("", [call])


def _turns(chat: ChatTokenizer, tools: Mapping[str, BaseTool], on_change: Any) -> Finding:
    """Three turns with a call and a result: does each prompt continue the tokens of the turn before?"""
    name, specs = "turns", tool_specs(tools) or [PROBE_TOOL]
    call = ToolCall(id="call_0", name=specs[0]["function"]["name"], arguments={"word": "x"})
    replies = [
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="assistant", content="It is 84."),
    ]
    after = [
        Message(role="tool", content=RESULT, tool_call_id="call_0", name=call.name),
        Message(role="user", content="Now by 8."),
    ]
    buffer, messages, alignments = TokenBuffer(chat, on_change=on_change), [QUESTION], list[str]()
    try:
        for reply, following in zip(replies, after, strict=True):
            buffer.prompt(messages, specs)
            alignments.append(buffer.add([*chat.encode(reply.content or "hm"), chat.end_id], closed=True))
            messages += [reply, following]
        buffer.prompt(messages, specs)
        alignments.append(buffer.add([chat.end_id], closed=True))
    except ToolwiseError as fault:
        cure = "use another chat template (model.chat_template)"
        return Finding(name, "wrong", f"a conversation with a call and its result fails: {fault}", cure=cure)
    kinds = ", ".join(dict.fromkeys(alignments[1:]))
    says = "one row per rollout: each prompt continues the sampled tokens"
    if "forked" in alignments:
        says = "several rows per rollout: the template writes earlier turns differently once there are later ones"
    return Finding(name, "ok", f"{says} ({kinds})", {"alignments": alignments})


def _control_tokens(chat: ChatTokenizer) -> Finding:
    texts = ("x", " ".join(chat.controls.texts))
    harmless, hostile = (Counter(chat.start([Message(role="user", content=text)])) for text in texts)
    known = chat.controls.ids - {chat.tokenizer.unk_token_id}  # which stands for text that the tokenizer does not know
    extra = [token for token in hostile if token in known and hostile[token] > harmless[token]]
    if extra:
        shown = ", ".join(chat.tokenizer.convert_ids_to_tokens(extra))
        cure = "use a fast tokenizer (tokenizer.json)"
        return Finding("control tokens", "wrong", f"text of a message becomes a control token: {shown}", cure=cure)
    return Finding("control tokens", "ok", f"none of {len(chat.controls.texts)} can be written by a message")


def tool_specs(tools: Mapping[str, BaseTool]) -> list[dict[str, Any]]:
    return [tool.get_openai_tool_schema().model_dump() for tool in tools.values()]
