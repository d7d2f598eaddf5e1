"""Tool calls under a grammar: always well formed, with text and tags unconstrained."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from toolwise.cli import app
from toolwise.config.rollout import GrammarConfig
from toolwise.engine.grammar import GrammarError, Vocabulary, grammar_from_config
from toolwise.errors import PolicyError
from toolwise.messages import Message
from toolwise.models import load_model, locate
from toolwise.policies.call_grammar import calls_grammar
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.rollout.parsers import PARSERS
from toolwise.routing.head.head import HeadSettings, RouterHead, save_head

torch.set_num_threads(1)
SEARCH = {
    "type": "object",
    "properties": {"query": {"$ref": "#/$defs/words"}, "top": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["query"],
    "additionalProperties": False,
    "$defs": {"words": {"type": "string", "maxLength": 20}},
}
PICK = {
    "type": "object",
    "properties": {"of": {"type": "array", "items": {"enum": ["é", "b"]}, "maxItems": 2}},
    "required": ["of"],
    "additionalProperties": False,
}
SCHEMAS = {"search": SEARCH, "pick": PICK}
SPECS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(loaded()[1].tokenizer)


def refused_at(text: str, tokenizer: Any = None, tables: Vocabulary | None = None) -> str | None:
    """The rest of a reply from where the grammar first rejects it; None if it accepts all of it, including its end."""
    tokenizer = tokenizer or loaded()[1].tokenizer
    end = loaded()[1].end_id
    constraint = (tables or vocabulary()).compile(calls_grammar(tokenizer, SPECS))
    mask = constraint.mask(Sampling(stop_token_ids=(end,)))
    ids = [*tokenizer.encode(text, add_special_tokens=False), end]
    for place, token in enumerate(ids):
        if not mask(ids[:place])[token]:
            return str(tokenizer.decode(ids[place:]))
    return None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "An answer, 3 < 4 and <tool is no call: naïve 日本.",
        "<think>hm</think>\n<action>look</action>",
        '<tool_call>{"name": "search", "arguments": {"query": "two words", "top": 3}}</tool_call>',
        '<think>a</think>So <tool_call>\n{"name": "pick", "arguments": {"of": ["é", "b"]}}\n</tool_call> and more',
        '<tool_call>{"name": "pick", "arguments": {"of": []}}</tool_call>'
        '<tool_call>{"name": "search", "arguments": {"query": ""}}</tool_call>',
    ],
)
def test_text_tags_and_right_calls_pass(text: str) -> None:
    assert refused_at(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"top": 3}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": "x", "top": 12}}</tool_call>',
        '<tool_call>{"name": "pick", "arguments": {"of": ["c"]}}</tool_call>',
        '<tool_call>{"name": "search"',
        "<tool_call>",
        "</tool_call>",
        "<|user|>",
    ],
)
def test_wrong_calls_and_what_only_a_template_writes_do_not(text: str) -> None:
    assert refused_at(text)


def test_a_call_spelt_out_in_other_tokens_is_no_way_around() -> None:
    tokenizer, end = loaded()[1].tokenizer, loaded()[1].end_id
    mask = vocabulary().compile(calls_grammar(tokenizer, SPECS)).mask(Sampling(stop_token_ids=(end,)))
    spelt = tokenizer.convert_tokens_to_ids(["<", "tool", "_", "call", ">"])
    assert [bool(mask(spelt[:place])[token]) for place, token in enumerate(spelt)] == [True] * 4 + [False]


def test_a_tokenizer_that_spells_the_tag_out_is_held_to_the_same() -> None:
    own = json.loads(loaded()[1].tokenizer.backend_tokenizer.to_str())
    own["added_tokens"] = [token for token in own["added_tokens"] if "tool_call" not in token["content"]]
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(own)), eos_token="<|end|>")
    tables = Vocabulary(plain, 2048)
    right = '<think>a</think>So <tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call> done'
    assert refused_at(right, plain, tables) is None
    assert refused_at(right.replace("search", "other"), plain, tables)
    assert refused_at("no call <tool at all", plain, tables) is None


def test_whatever_is_drawn_every_call_is_one_of_the_tools_with_valid_arguments() -> None:
    sampling = Sampling(max_new_tokens=96, temperature=1.3)
    held, free = (LocalPolicy(*loaded(), sampling, grammar=grammar) for grammar in ("tool_calls", None))

    async def act(policy: LocalPolicy) -> list[tuple[str, str]]:
        asked = [[Message(role="user", content=f"Find {word}.")] for word in ("tea", "Rome", "the sum of 3 and 4")]
        sessions = [policy.session(seed=seed, do_sample=True) for seed in range(24)]
        acted = [session.get_action(asked[seed % 3], SPECS) for seed, session in enumerate(sessions)]
        return [(text or "", logprobs["finish_reason"]) for _, text, logprobs, _ in await asyncio.gather(*acted)]

    def wrong(found: list[tuple[str, str]]) -> list[str]:
        told = []
        for text, finish in found:
            for call in PARSERS["hermes"](text)[1] if finish != "length" else ():
                try:
                    jsonschema.validate(call.arguments, SCHEMAS[call.name])
                except (KeyError, jsonschema.ValidationError) as fault:
                    told.append(str(fault))
        return told

    constrained = asyncio.run(act(held))
    assert not wrong(constrained)
    assert sum(finish == "tool_calls" for _, finish in constrained) >= 5
    assert wrong(asyncio.run(act(free))), "or the test shows nothing"


def test_without_tools_a_turn_is_free() -> None:
    policy = LocalPolicy(*loaded(), Sampling(), grammar="tool_calls")
    assert policy.constraint(None) is None
    assert policy.constraint([]) is None
    assert policy.constraint(SPECS) is policy.constraint(SPECS)


def test_it_is_for_the_form_of_hermes() -> None:
    with pytest.raises(PolicyError, match=r"hermes format: set rollout\.tool_parser"):
        LocalPolicy(*loaded(), Sampling(), parser="llama3", grammar="tool_calls")
    assert grammar_from_config(GrammarConfig(tool_calls=True)) == "tool_calls"


def test_what_a_grammar_cannot_hold_a_reply_to_is_left_to_the_tool() -> None:
    schema = {"type": "object", "properties": {"of": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "x", "parameters": schema}}, {"function": {"name": "bare"}}]
    assert (
        vocabulary().compile(calls_grammar(loaded()[1].tokenizer, tools)).mask(Sampling(stop_token_ids=(5,)))([]).any()
    )


def test_a_tool_whose_schema_cannot_be_met_is_one_line() -> None:
    impossible = [{"type": "function", "function": {"name": "x", "parameters": {"$ref": "#/nowhere"}}}]
    with pytest.raises(GrammarError, match=r"the grammar of tool calls: .*nowhere") as told:
        vocabulary().compile(calls_grammar(loaded()[1].tokenizer, impossible))
    assert "\n" not in str(told.value)


def test_a_routed_question_is_answered_under_a_grammar(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(locate("builtin:small"), model)
    width = int(json.loads((model / "config.json").read_text())["hidden_size"])
    routes = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")
    save_head(RouterHead(HeadSettings(width=width, routes=routes)), model, {"multipliers": {}})
    ended = CliRunner().invoke(
        app,
        ["run", str(model), "Which?", "--route", "answer", "--set", "rollout.grammar.regex=(red|blue){2}", "--json"],
    )
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["text"] in ("redred", "redblue", "bluered", "blueblue")
