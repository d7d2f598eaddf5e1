"""Detecting a model's format, and saying why. Format only: marks from the models' documentation."""

from __future__ import annotations

import pytest

from toolwise.rollout.parsers import PARSERS, RENDERERS, detect_parser, explain_parser
from toolwise.rollout.parsers.detect import _RULES


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
            "deepseek_v3",
        ),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ("<｜DSML｜function_calls> <｜tool▁calls▁begin｜>", "deepseek_v32"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss"),
        ("<|START_THINKING|> <|START_ACTION|>[", "cohere"),
        ("<|start_of_role|>assistant_tool_call <|tool_call|>", "granite"),
        ("<|start_of_role|> within <tool_call></tool_call> XML tags", "hermes"),
        ("<|tool|>' + tools + '<|/tool|> <|tool_call|> <|/tool_call|>", "phi4"),
        ("<tool_call> in xml, <code> in python", "smollm3"),
        ("<start_function_call>call:", "functiongemma"),
        ("<minimax:tool_call>", "minimax"),
        ("<seed:tool_call>\\n<function=f>", "seed_oss"),
        ("<function_calls>", "olmo3"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("<TOOLCALL>[", "nemotron"),
        ("<tool_calls>[", "hunyuan"),
        ("```tool_code", "gemma3"),
    ],
)
def test_templates(template: str, name: str) -> None:
    assert detect_parser(template) == name


def test_the_reason_names_the_marks_and_where_they_are() -> None:
    assert explain_parser("<tool_call>\n<function=") == (
        "qwen3_coder",
        "the chat template has <tool_call> and <function=",
    )
    assert explain_parser("", ["<s>", "[TOOL_CALLS]"]) == ("mistral", "the tokenizer has the token [TOOL_CALLS]")
    assert explain_parser(None).name == "auto"
    assert "neither" in explain_parser(None).why


def test_every_rule_names_a_parser() -> None:
    assert {rule.name for rule in _RULES} <= set(PARSERS)
    assert set(RENDERERS) - {rule.name for rule in _RULES} == {"qwen", "rlla"}, "a second name, and no model's template"
