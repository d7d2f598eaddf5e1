"""Make the model that ships with Toolwise from scratch: tokenizer, chat template, weights.

    python scripts/make_small_model.py --out src/toolwise/models/small

Trains a Llama-shaped model of about two million parameters on synthetic conversations from `small_world_teacher.py`.
Takes minutes on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from small_world_teacher import conversations
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolwise.config.sft import SftConfig
from toolwise.learner.conversations import Example, tokenize_conversation
from toolwise.learner.supervised import sft_steps
from toolwise.messages import Message
from toolwise.rollout.chat_tokenizer import ChatTokenizer

CONTROL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TAGS = [f"<{slash}{tag}>" for tag in ("tool_call", "think", "level", "action", "response") for slash in ("", "/")]
TEMPLATE = Path(__file__).with_name("small_chat_template.jinja")
ROOT = Path(__file__).parent.parent


def make_tokenizer(rows: list[dict], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, trained on the conversations and on the English of the test data."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    ours = [json.dumps(m) for row in rows[:5000] for m in row["messages"]]
    english = [
        line for path in sorted((ROOT / "tests/fixtures").glob("*.json*")) for line in path.read_text().splitlines()
    ]
    tokenizer.train_from_iterator(ours + english, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE.read_text(),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        extra_special_tokens=CONTROL[2:],
    )


def make_model(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=192,
            intermediate_size=576,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_examples(folder: Path, count: int, seed: int) -> list[Example]:
    chat = ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    return [
        example
        for row in conversations(count, seed=seed)
        for example in tokenize_conversation(chat, [Message.model_validate(m) for m in row["messages"]], row["tools"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--conversations", type=int, default=120_000, help="number of conversations")
    parser.add_argument("--steps", type=int, default=1600, help="training steps")
    parser.add_argument("--batch-tokens", type=int, default=32_768, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--vocabulary", type=int, default=2048, help="size of the vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()

    began = time.time()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(conversations(5000, seed=args.seed), args.vocabulary)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    workers = os.cpu_count() or 1
    jobs = [(args.out, args.conversations // workers, args.seed + 1 + worker) for worker in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        examples = [example for part in pool.map(make_examples, *zip(*jobs, strict=True)) for example in part]
    print(
        f"{len(examples)} conversations of {sum(len(e.ids) for e in examples) / len(examples):.1f} tokens; "
        f"{time.time() - began:.0f} s",
        flush=True,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(tokenizer, args.vocabulary).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    config = SftConfig(
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        lr=args.lr,
        weight_decay=0.05,
        seed=args.seed,
    )
    for step, metrics in enumerate(sft_steps(model, examples, config), start=1):
        if step % 200 == 0:
            print(f"step {step}: loss {metrics['loss']:.4f}; {time.time() - began:.0f} s", flush=True)
    model.to("cpu").save_pretrained(args.out)


if __name__ == "__main__":
    main()
