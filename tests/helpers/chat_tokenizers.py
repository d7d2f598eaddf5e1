"""Tokenizers for the tests of tokens: each chat template in tests/fixtures/templates over several small BPE
tokenizers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolwise.rollout.chat_tokenizer import ChatTokenizer

FOLDER = Path(__file__).parents[1] / "fixtures" / "templates"
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
CONTROLS = {
    "chatml": CHATML,
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "forgetful": CHATML,
    "trailing": CHATML,
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|python_tag|>"),
    "mistral": (
        "</s>",
        "<s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "strict": ("<end_of_turn>", "<start_of_turn>", "<bos>"),
}
"""The control tokens of each template's tokenizer, that which ends a turn first."""
BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "strict": "<bos>"}
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
KINDS = ("bytes", "tagged", "crossing", "folding", "folding_controls", "dropping")
CORPUS = [
    "user\nassistant\ntool\nsystem\n\n\n What is 2 + 2?\n\n 4.\n <think>\nhmm\n</think>\n\nIt is 4.\n",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>',
    "The answer is  four, or <b>five</b>. The end of the end; the <| and the |> of it.",
] * 4


@cache
def chat_tokenizer(template: str, kind: str = "bytes", pad: str | None = None) -> ChatTokenizer:
    return ChatTokenizer(tokenizer(template, kind, pad))


def tokenizer(template: str, kind: str = "bytes", pad: str | None = None) -> Any:
    """`kind`: bytes (whole), tagged (tags are tokens of their own), crossing (GPT-2's rule: how
    white space is cut depends on what comes after it), folding (NFKC and lower case; folding_controls: for
    control tokens too), dropping (accents and whatever it does not know are lost)."""
    core = Tokenizer(models.BPE())
    if kind.startswith("folding"):
        core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if kind == "dropping":
        core.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
        core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
        core.decoder = decoders.Fuse()
        alphabet = sorted({c for text in CORPUS for c in text} | set(map(chr, range(32, 127))))
    else:
        words = pre_tokenizers.Split(Regex(r" ?\w+|\s*[\r\n]+| ?[^\s\w]+|\s+(?!\S)|\s+"), "isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "crossing")
        core.pre_tokenizer = bytewise if kind == "crossing" else pre_tokenizers.Sequence([words, bytewise])
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    controls = [AddedToken(t, special=True, normalized=kind == "folding_controls") for t in CONTROLS[template]]
    core.add_special_tokens(controls)
    if kind == "tagged":
        core.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=controls[0],
        bos_token=BOS.get(template),
        pad_token=controls[0] if pad == "eos" else pad,
        chat_template=(FOLDER / f"{template}.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        name_or_path=f"tests/{template}",
    )
