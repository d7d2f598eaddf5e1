"""Checks that a model can be used as configured: what it sees, how it calls tools, where its turns end, what it needs.

`check_chat` needs the tokenizer only and runs before a run reads its data; `check_model` needs the loaded model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError, ModelError, ToolwiseError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.call_format import CallFormat, ParserSpec
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.rollout.tokens import TokenBuffer
from toolwise.tools.base import BaseTool
from toolwise.types.findings import Finding

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

log = logging.getLogger("toolwise.training")

QUESTION = Message(role="user", content="Multiply 12 by 7.")
RESULT = "84"
FP32 = 4
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


def check_chat(config: RunConfig, tools: Mapping[str, BaseTool], parser: ParserSpec | None = None) -> ChatTokenizer:
    """Raise if the model's folder, tokenizer or chat template cannot hold a conversation with these tools."""
    from toolwise.models import load_chat

    model = config.model
    chat = load_chat(
        model.path,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        chat_template=model.chat_template,
        template_kwargs=model.template_kwargs,
    )
    form = chat.find_format(config.rollout.tool_parser if parser is None else parser)
    chat.set_tool_prompt(config.rollout.tool_prompt, form)
    if config.multi_turn.enable and tools:
        check_tool_prompt(config, chat)
        _report(chat_findings(chat, config, form, tools))
    return chat


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
    return strip_guard_marks(chat.render([QUESTION], _specs(tools)))


def check_model(policy: LocalPolicy, config: RunConfig, tools: Mapping[str, BaseTool]) -> list[Finding]:
    """All findings about a loaded model. One with the verdict "wrong" prevents a run."""
    findings = chat_findings(policy.chat, config, policy.call_format, tools)
    return [_model(policy), *findings, _engine(policy), _memory(policy, config)]


def check_weights(policy: LocalPolicy) -> None:
    """Raise if the loaded weights do not fit the tokenizer."""
    _report([_model(policy)])


def chat_findings(
    chat: ChatTokenizer, config: RunConfig, form: CallFormat, tools: Mapping[str, BaseTool]
) -> list[Finding]:
    """What the tokenizer and the chat template alone tell."""
    return [
        _turn_ends(chat),
        _parser(chat, config, form),
        _tool_prompt(chat, tools),
        _round_trip(chat, form),
        _turns(chat, tools, config.rollout.on_template_change),
        _control_tokens(chat),
    ]


def _report(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.verdict == "wrong":
            raise ConfigError(f"the model cannot be used: {finding.name}: {finding.says}: {finding.cure}")
        if finding.verdict == "warning":
            log.warning("%s: %s: %s", finding.name, finding.says, finding.cure)


def _model(policy: LocalPolicy) -> Finding:
    model, chat = policy.model, policy.chat
    embedded = model.get_input_embeddings().weight.shape[0]
    count = sum(parameter.numel() for parameter in model.parameters())
    figures = {"parameters": count, "vocabulary": embedded, "context": policy.max_context}
    if len(chat.tokenizer) > embedded:
        return Finding(
            "model",
            "wrong",
            f"the tokenizer has {len(chat.tokenizer):,} tokens, the model's embeddings only {embedded:,}",
            figures,
            cure="use the tokenizer the model was trained with, or resize its embeddings and save it",
        )
    says = (
        f"{type(model).__name__}, {count / 1e6:,.1f} million weights in {_dtype(model)} on {model.device}; context "
        f"{policy.max_context:,} tokens, vocabulary {embedded:,}"
    )
    return Finding("model", "ok", says, figures)


def _turn_ends(chat: ChatTokenizer) -> Finding:
    ends, opening = chat.turn_ends, _opening(chat)
    written = ", ".join(ends.ends) or f"the opening of the next message ({', '.join(ends.openings)})"
    says = f"generation stops at {', '.join(ends.stops)}; in a conversation a reply ends with {written}"
    thought = f"; the prompt ends in {opening!r}, so replies start inside a thought" if "<think>" in opening else ""
    return Finding("turn end", "ok", says + thought, {"stop_ids": list(chat.stop_ids)})


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
    name, specs = "turns", _specs(tools) or [PROBE_TOOL]
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
    extra = [token for token in hostile if token in chat.controls.ids and hostile[token] > harmless[token]]
    if extra:
        shown = ", ".join(chat.tokenizer.convert_ids_to_tokens(extra))
        cure = "use a fast tokenizer (tokenizer.json)"
        return Finding("control tokens", "wrong", f"text of a message becomes a control token: {shown}", cure=cure)
    return Finding("control tokens", "ok", f"none of {len(chat.controls.texts)} can be written by a message")


def _engine(policy: LocalPolicy) -> Finding:
    from toolwise.engine import engine_path

    path, reason = engine_path(policy.model)
    return Finding("engine", "ok", f"{path}: {reason}" if reason else path, {"path": path})


def _memory(policy: LocalPolicy, config: RunConfig) -> Finding:
    """Computed from sizes; `train --dry-run` also measures what activations need."""
    parts = memory_parts(policy.model, config)
    cache = config.rollout.cache_mb
    tokens = config.data.batch_size * config.rollout.n * config.rollout.max_new_tokens
    shown = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts.items())
    generation = f"{kv_bytes_per_token(policy.model) / 1e3:.1f} kB of cache per token"
    limit = f"rollout.cache_mb = {cache}" if cache else "rollout.cache_mb unset"
    says = f"training {shown} and activations; generation {generation}, {tokens:,} new tokens per step, {limit}"
    return Finding("memory", "ok", says, parts)


def memory_parts(model: Any, config: RunConfig) -> dict[str, int]:
    """Bytes of what training holds besides activations: by the weights' sizes and what is trained."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    lora, merged = config.actor.lora, {}
    if lora.rank:
        from toolwise.learner.lora import find_layers

        adapted = [layer.weight for layer in find_layers(model, lora.target_modules).values()]
        count = sum(lora.rank * sum(weight.shape) for weight in adapted)
        weights += FP32 * count
        merged = {"merged weights": sum(weight.numel() * weight.element_size() for weight in adapted)}
    trained = {"gradients": FP32 * count, "optimizer states": 2 * FP32 * count}
    masters = {} if _dtype(model) == "float32" or lora.rank else {"fp32 master weights": FP32 * count}
    return {"weights": weights} | merged | trained | masters


def kv_bytes_per_token(model: Any) -> int:
    config = model.get_decoder().config
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(config.num_hidden_layers) * key_heads * size * int(model.dtype.itemsize)


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _specs(tools: Mapping[str, BaseTool]) -> list[dict[str, Any]]:
    return [tool.get_openai_tool_schema().model_dump() for tool in tools.values()]
