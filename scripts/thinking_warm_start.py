"""Train a tiny model on thinking levels in the rooms environment, and print the forced-level table of docs/results.md.

    python scripts/thinking_warm_start.py --out runs/rooms

A fresh Llama of about 0.7 million weights with one token per word, trained like `toolwise sft` on walks with random
levels, map-reading exercises, and walks whose agent is given its levels. To train another model on the same
conversations, use `python -m toolwise.demo.rooms.demonstrations` and `toolwise sft`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch  # noqa: E402
from thinking_table import forced_table, show  # noqa: E402
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from toolwise.config.sft import SftConfig  # noqa: E402
from toolwise.data.files import write_rows  # noqa: E402
from toolwise.demo.rooms.demonstrations import (  # noqa: E402
    demonstrations,
    instructed_walks,
    lessons,
    task_rows,
)
from toolwise.learner.conversations import Example, tokenize_conversation  # noqa: E402
from toolwise.learner.supervised import sft_steps  # noqa: E402
from toolwise.messages import Message  # noqa: E402
from toolwise.models import load_model, locate  # noqa: E402
from toolwise.rollout.chat_tokenizer import ChatTokenizer  # noqa: E402

CONTROL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TAGS = [f"<{slash}{tag}>" for tag in ("level", "think", "action") for slash in ("", "/")]
TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
PIECES = r" ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]"
"""A word with the space before it; every digit and other character separately, so that a mark is one token."""

SELDOM = [
    "Nothing happens. A map is here.",
    "You cannot do that. The door has a hall.",
    "Nothing happens. You have the map.",
    "You are out.",
    "The floor gives way.",
    "The walk is over.",
    "question",
    "0123456789",
]
"""Rare texts: answers of the environment to mistakes, and probes of the chat template."""


def fresh_model(folder: Path, *, seed: int, width: int, layers: int) -> int:
    """An untrained Llama and a tokenizer of the environment's words; returns the number of weights."""
    said = [message["content"] for row in demonstrations(2000) for message in row["messages"]]
    parts = [part for text in [*said, *SELDOM] for part in re.split("|".join(TAGS), text)]
    words = sorted({word for part in parts for word in re.findall(PIECES, part)})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<|unk|>", *words])}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=CONTROL[2:],
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def make_examples(folder: str, count: int, taught: int, told: int, seed: int) -> list[Example]:
    """Tokenized walks and exercises; runs in separate processes, since it takes longer than training a small model."""
    chat = ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    return [
        example
        for row in chain(
            demonstrations(count, seed=seed), lessons(taught, seed=seed), instructed_walks(told, seed=seed)
        )
        for example in tokenize_conversation(chat, [Message.model_validate(message) for message in row["messages"]])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data, models and table")
    parser.add_argument("--count", type=int, default=30_000, help="walks with random levels")
    parser.add_argument("--lessons", type=int, default=20_000, help="map-reading exercises")
    parser.add_argument("--told", type=int, default=30_000, help="walks whose agent is given its levels")
    parser.add_argument("--steps", type=int, default=3000, help="training steps")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--width", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=3, help="number of layers")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop training after this many seconds")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--model", help="start from this model instead of a fresh one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that tokenize")
    parser.add_argument("--houses", type=int, default=200, help="held-out houses in the table")
    args = parser.parse_args()

    began = time.time()
    start = Path(args.model) if args.model else args.out / "fresh"
    write_rows(list(task_rows(range(2000), "train")), args.out / "train.jsonl")
    write_rows(list(task_rows(range(1000), "heldout")), args.out / "heldout.jsonl")
    if not args.model:
        weights = fresh_model(start, seed=args.seed, width=args.width, layers=args.layers)
        print(f"{weights:,} weights", flush=True)
    workers = min(args.jobs, args.count)
    shares = (args.count // workers, args.lessons // workers, args.told // workers)
    parts = [(locate(str(start)), *shares, args.seed * workers + worker) for worker in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        examples = [example for part in pool.map(make_examples, *zip(*parts, strict=True)) for example in part]
    tokens = sum(len(example.ids) for example in examples) / len(examples)
    print(f"{len(examples)} walks and exercises of {tokens:.0f} tokens; {time.time() - began:.0f} s", flush=True)
    model, chat = load_model(str(start))
    config = SftConfig(steps=args.steps, batch_tokens=args.batch_tokens, lr=args.lr, seed=args.seed)
    for step, figures in enumerate(sft_steps(model, examples, config), start=1):
        if step % max(1, args.steps // 20) == 0:
            print(f"step {step}: loss {figures['loss']:.4f}; {time.time() - began:.0f} s", flush=True)
        if time.time() - began > args.limit_s:
            print(f"stopped at step {step} of {args.steps}", flush=True)
            break
    taught = args.out / "taught"
    model.to("cpu").eval().save_pretrained(taught)
    chat.tokenizer.save_pretrained(taught)
    table = forced_table(str(taught), houses=args.houses)
    (args.out / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    print(show(table))
    print(f"{time.time() - began:.0f} s, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
