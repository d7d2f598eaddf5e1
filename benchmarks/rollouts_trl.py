"""TRL 1.16's side of rollouts.py: how GRPOTrainer overlaps one 0.1 s async tool call in each of N rollouts.

    make bench-env
    .venv-bench/bin/python benchmarks/rollouts_trl.py [N …]      N = 32 and 128 by default; one line of JSON each

Everything is TRL's own code, reached through `trainer.train()`: prompts through the chat template, response parsing,
the tool loop, rewards, loss and optimizer, on the model that ships with Toolwise. Only `model.generate` is replaced: a
row without a tool result gets the call, the others the answer. The time is that of `GRPOTrainer._generate`, from a
batch of prompts to finished conversations, without rewards, log-probs, loss and update. `most_at_once` is the largest
number of concurrent tool calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_schema

MODEL = Path(__file__).parents[1] / "src" / "toolwise" / "models" / "small"
CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
TOOL_S = 0.1
REPEATS = 3
GROUP = 8


class WaitTool:
    """Waits, and counts concurrent calls."""

    def __init__(self) -> None:
        self.calls = self.running = self.most_at_once = 0

    async def wait(self) -> str:
        """Waits."""
        self.calls += 1
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(TOOL_S)
        self.running -= 1
        return "done"


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with a clock around its rollouts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_seconds: list[float] = []

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        rolled_out = super()._generate(prompts)
        self.rollout_seconds.append(time.perf_counter() - began)
        return rolled_out


def parts() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    # TRL requires a schema for an unknown chat template: this is TRL's own for the same call format, with our end of
    # turn instead of Qwen's.
    schema: Any = copy.deepcopy(qwen3_schema)
    schema["x-regex"] = schema["x-regex"].replace(r"<\|im_end\|>", r"<\|end\|>")
    tokenizer.response_schema = schema
    model = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=False)
    call, answer = (torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id]) for text in (CALL, "done"))
    result = tokenizer.convert_tokens_to_ids("<|tool|>")

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        turns = [answer if bool((row == result).any()) else call for row in input_ids]
        padded = torch.nn.utils.rnn.pad_sequence(turns, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([input_ids, padded], dim=1)

    model.generate = generate
    return model, tokenizer


def all_finished(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """The reward; also checks that every rollout called the tool, got its result and ended."""
    for completion in completions:
        told = [(m["role"], m["content"], bool(m.get("tool_calls"))) for m in completion]
        assert told == [("assistant", "", True), ("tool", "done", False), ("assistant", "done", False)], told
    return [1.0] * len(completions)


def overlap(count: int) -> dict[str, Any]:
    """The best of a few runs, as in rollouts.py."""
    model, tokenizer = parts()
    tool = WaitTool()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=count,
            num_generations=GROUP,
            max_steps=REPEATS,
            max_completion_length=256,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]} for _ in range(count * REPEATS)])
        trainer = TimedTrainer(
            model,
            reward_funcs=all_finished,
            args=settings,
            train_dataset=prompts,
            processing_class=tokenizer,
            tools=[tool.wait],
        )
        trainer.train()
    assert len(trainer.rollout_seconds) == REPEATS
    assert tool.calls == count * REPEATS
    best = min(trainer.rollout_seconds)
    return {"n": count, "seconds": best, "times_perfect": best / TOOL_S, "most_at_once": tool.most_at_once}


def main() -> None:
    transformers.logging.set_verbosity_error()
    for count in [int(n) for n in sys.argv[1:]] or [32, 128]:
        with contextlib.redirect_stdout(sys.stderr):
            figures = overlap(count)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
