"""Calls as the chat templates of published models write them, read back. The templates are those in TRL's package."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from toolwise.messages import ToolCall
from toolwise.models import locate
from toolwise.rollout.parsers import PARSERS, detect_parser, explain_parser, parse_for_tools

ARGUMENTS: list[dict[str, Any]] = [
    {
        "city": "São Paulo 🦉",
        "quoted": 'it\'s "x" {a: [1]} \\ <b>\nnext line',
        "days": 5,
        "list": [1, {"key": None}, "a, b"],
        "object": {"a": "b", "c": {"d": 1.5}},
        "flag": True,
        "nothing": None,
        "ratio": -0.25,
    },
    {"digits": "plain"},
]
PARSER_OF = {
    "deepseek_r1_distill": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "diffusion_gemma": "gemma4",
    "gemma4": "gemma4",
    "glm4moe": "glm",
    "gptoss": "gpt_oss",
    "lfm2": "lfm2",
    "llama3": "llama3",
    "muse_glimmer": "muse_glimmer",
    "nemotron_3": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "qwen2_5_vl": "auto",
}
"""By the beginning of a template's name; the longest counts. Others say nothing about calls: "auto"."""
UNESCAPED = {"lfm2_2_5", "lfm2_2_5_v2"}
"""Templates that write strings in quotes without escaping quotes in them: not even the model can read those."""
ONE_CALL = {"llama3_1", "llama3_2", "gptoss", "gptoss_training"}
"""Templates that reject several calls in a turn, or write only the first."""


def folder() -> Path:
    spec = importlib.util.find_spec("trl")  # found, not imported
    assert spec is not None, "TRL, whose package holds the templates, is not installed: pip install -e '.[dev]'"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def names() -> list[str]:
    spec = importlib.util.find_spec("trl")
    locations = spec.submodule_search_locations if spec else None
    return sorted(path.stem for path in Path(locations[0], "chat_templates").glob("*.jinja")) if locations else ["none"]


@cache
def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(locate("builtin:small"))
    loaded.bos_token = loaded.eos_token
    return loaded


def source(name: str) -> str:
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")


def schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {key: {"type": types.get(type(v), "null"), "description": "one"} for key, v in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


def reply(name: str, calls: list[ToolCall], content: str | None) -> str | None:
    """The assistant's turn as the template writes it; None if it rejects the conversation."""
    template = source(name)
    tools = [schema(call.name, call.arguments) for call in calls if isinstance(call.arguments, dict)]
    rendered = None
    for as_text in (False, True):  # DeepSeek's take arguments as JSON text
        written = [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments,
                },
            }
            for i, call in enumerate(calls)
        ]
        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": content, "tool_calls": written}
        try:
            rendered = apply(template, [question, answer], tools, False)
            break
        except Exception:  # a template raises anything
            continue
    if rendered is None:
        return None
    prompt = apply(template, [question], tools, True)
    shared = next((i for i, pair in enumerate(zip(rendered, prompt, strict=False)) if len(set(pair)) == 2), len(prompt))
    return rendered[shared:]


def apply(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation_prompt: bool) -> str:
    text: str = tokenizer().apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=generation_prompt
    )
    return text


@cache
def written_calls(name: str, count: int) -> str | None:
    """A turn in which the template writes the calls, with or without text beside them; None if it never does."""
    calls = some_calls(name, count)
    for content in ("", "Let me see.", None):
        text = reply(name, calls, content)
        if text is not None and all(call.name in text for call in calls):
            return text
    return None


def some_calls(name: str, count: int) -> list[ToolCall]:
    arguments = [dict(each) for each in ARGUMENTS]
    if name.removesuffix("_training") in UNESCAPED:
        arguments[0]["quoted"] = "no quotes: {a: [1]}"
    return [ToolCall(id=f"call_{i}", name=f"get_weather_{i}", arguments=arguments[i]) for i in range(count)]


@pytest.mark.parametrize("name", names())
def test_the_format_of_every_template_is_known(name: str) -> None:
    known = max((start for start in PARSER_OF if name.startswith(start)), key=len, default="")
    found = explain_parser(source(name))
    assert found.name == PARSER_OF.get(known, "auto"), found.why
    assert found.why


@pytest.mark.parametrize("name", names())
def test_a_template_without_a_known_format_writes_no_calls(name: str) -> None:
    if detect_parser(source(name)) == "auto":
        assert written_calls(name, 1) is None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", names())
def test_what_a_template_writes_is_read_back(name: str, count: int) -> None:
    calls = some_calls(name, count)
    text = written_calls(name, count)
    if count == 2 and name in ONE_CALL:
        assert text is None
        return
    if text is None:
        return
    parse = PARSERS[detect_parser(source(name))]
    assert parse(text)[1] == calls
    tools = [schema(call.name, call.arguments) for call in calls if isinstance(call.arguments, dict)]
    assert parse_for_tools(parse, text, tools)[1] == calls
    assert PARSERS["auto"](text)[1] == calls or detect_parser(source(name)) in ("gemma3", "smollm3")


def test_templates_write_calls() -> None:
    """The tests above are not empty."""
    folder()
    writing = {name for name in names() if written_calls(name, 1)}
    assert {detect_parser(source(name)) for name in writing} == set(PARSER_OF.values()) - {"auto"}
    assert len(writing) >= 45
