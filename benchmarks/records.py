"""What the rollouts of a run take on the disk: 60 steps of 256 rollouts of RLLA's tasks, eight for each.

    python benchmarks/records.py

Prompts and replies are RLLA's: the first rollout of a task has the reply of its row, the others have those of other
rows, which are less alike than eight samples of a model. Tokens are those of the small model's tokenizer, with GRPO's
advantages and their parts; log-probs, entropies and gaps are random numbers.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from toolwise.advantages import Grpo
from toolwise.config.records import RecordsConfig
from toolwise.data import open_tasks
from toolwise.data.prepare import prepare_rlla
from toolwise.messages import Message
from toolwise.models import load_chat
from toolwise.training.rollout_files import RolloutFiles
from toolwise.types import (
    AnnotatedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StepData,
    StepEvent,
    StopReason,
    Task,
    UpdatedTokens,
    Usage,
)

ROWS = Path(__file__).parents[1] / "tests" / "fixtures" / "rlla_sft.json"
GROUP = 8


class Workload:
    def __init__(self, tasks: list[Task], tokenizer: Any) -> None:
        self.tasks, self.tokenizer = tasks, tokenizer
        self.rng, self.numbers = random.Random(0), np.random.default_rng(0)
        self.ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.ids:
            self.ids[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.ids[text]

    def rollout(self, name: str, task: Task, reply: str) -> ScoredRollout:
        sampled = self.encode(reply)
        step = StepData(
            system_step_index=0,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={
                "prompt_ids": self.encode("".join(message.content or "" for message in task.prompt)),
                "token_ids": sampled,
                "logprobs": (-self.numbers.exponential(0.3, len(sampled)).astype(np.float32)).tolist(),
                "policy_version": 1,
            },
            step_info={},
        )
        messages = (*task.prompt, Message(role="assistant", content=reply))
        group = name.rpartition("/")[0]
        rollout = Rollout(name, group, 0, 0, task, None, (step,), messages, StopReason.ANSWERED, Usage())
        return ScoredRollout(rollout, EvaluateResult(score=float(self.rng.choice((-3, 0, 1, 4)))), (step,))

    def event(self, folder: Path, step: int, rollouts: int) -> StepEvent:
        scored = []
        for group, task in enumerate(self.rng.sample(self.tasks, rollouts // GROUP)):
            others = [str(other.ground_truth) for other in self.rng.sample(self.tasks, GROUP - 1)]
            for number, reply in enumerate([str(task.ground_truth), *others]):
                scored.append(self.rollout(f"step-{step}/{group}/{number}", task, reply))
        credited = list(Grpo()([AnnotatedRollout(s) for s in scored]).rollouts)
        updated = {c.rollout.rollout_id: self.columns(sum(map(len, c.advantages))) for c in credited}
        return StepEvent(folder, step, {}, scored, credited, updated)

    def columns(self, count: int) -> UpdatedTokens:
        gaps, entropies = (self.numbers.normal(0, scale, count).astype(np.float32) for scale in (1e-5, 1.0))
        return UpdatedTokens(gaps, np.abs(entropies), np.zeros(count, dtype=bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="RLLA's rows, or others of its format")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=256, help="per step, a multiple of eight")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        prepare_rlla(options.rows, out / "rlla.parquet")
        tokenizer = load_chat("builtin:small").tokenizer
        work = Workload(list(open_tasks(out / "rlla.parquet")), tokenizer)
        configs = {"all plain": RecordsConfig(plain_steps=None), "default": RecordsConfig()}
        configs["smallest"] = RecordsConfig(plain_steps=1, token_steps=1)
        writers = {name: RolloutFiles(config, tokenizer) for name, config in configs.items()}
        seconds = dict.fromkeys(writers, 0.0)
        for step in range(1, options.steps + 1):
            event = work.event(out, step, options.rollouts)
            for name, files in writers.items():
                began = time.process_time()
                files.on_step(StepEvent(out / name, step, {}, event.rollouts, event.credited, event.updated))
                seconds[name] += time.process_time() - began
        tokens = sum(len(s.tokens.prompt_ids) + len(s.tokens.token_ids) for r in event.rollouts for s in r.steps)
        print(f"{options.steps} steps of {options.rollouts} rollouts, of {tokens / options.rollouts:.0f} tokens each")
        for name in writers:
            sizes = {
                what: sum(path.stat().st_size for path in (out / name / "rollouts").glob(pattern)) / 1e6
                for what, pattern in (
                    ("messages", "*.jsonl*"),
                    ("tokens", "*.tokens.parquet"),
                    ("index", "*.index.parquet"),
                    ("in all", "*"),
                )
            }
            parts = ", ".join(f"{what} {size:.1f} MB" for what, size in sizes.items())
            print(f"{name}: {parts}; {1000 * seconds[name] / options.steps:.0f} ms of CPU per step")


if __name__ == "__main__":
    main()
