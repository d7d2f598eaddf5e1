"""GiGPO against GRPO on a small grid world with a sparse reward, PPO with a critic, and KL control: docs/results.md.

    python scripts/grid_gigpo.py --jobs 16 --limit-s 500 --out runs/grid       again, until it says that all is done
    python scripts/grid_report.py --out runs/grid --picture docs/images/grid_gigpo.png > section.md

Every run is a process of its own and leaves OUT/runs/NAME.jsonl: a line a step, and a last one with `"done": true`.
Runs that have that line are not made again; others begin anew. What was settled before any of the paired runs was made:

    reached     the first step at which the mean success of the last 5 steps' training rollouts is 90 % or more; what
                counts is all rollouts made up to the end of that step. Not within the run: all its rollouts, and "not"
    sweep       the same learning rates for both, on seeds of its own (100, 101, 102); the best has the fewest rollouts
                to 90 % on average, where not reached counts as twice the run
    paired      seeds 0 to 9; each begins from its own model, taught by `toolwise.sft`, the same for all algorithms
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]

from grid_world import MOVES, GridEnv, grid_of, make_rows  # noqa: E402

RATES = [5e-4, 1e-3, 2e-3, 4e-3]
TUNING_SEEDS = [100, 101, 102]
PAIRED_SEEDS = list(range(10))
OTHER_SEEDS = [0, 1, 2]
STEPS, TASKS, ROLLOUTS = 110, 8, 8
WINDOW, WANTED = 5, 0.9
WORLD: dict[str, Any] = {"layout": 4, "size": 6, "walls": 0.2, "goals": 1, "least_distance": 4}
TURNS = 24
GUIDED = 0.0
"""The share of taught moves that lead nearer to the goal; the others are drawn blindly."""
REPEATED = 8
"""Taught walks an episode."""
REFUSED = 0.1
"""The share of taught moves that answer a refusal: it must not end in more and more of them."""
KL_TARGET = 0.1
HELD_OUT = 5
"""No episode begins at every fifth start; walks that began elsewhere do pass through it."""
HELD_OUT_WALKS = 16
"""Walks of each of them at a validation."""
CONTROL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = """\
{%- for message in messages if message.role != 'system' %}
{{- '<|' + message.role + '|>' + (message.content or '') + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


@dataclass(frozen=True)
class Job:
    """One run, or one warm start."""

    name: str
    kind: str
    """warm, sweep, paired, ppo or kl"""
    estimator: str
    seed: int
    lr: float = 0.0
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    stop_early: bool = False
    """Stop where the goal is reached: the curve after it is of no use."""


def sweep_jobs() -> list[Job]:
    return [
        Job(f"sweep-{estimator}-{lr:g}-{seed}", "sweep", estimator, seed, lr, stop_early=True)
        for seed in TUNING_SEEDS
        for estimator in ("grpo", "gigpo")
        for lr in sorted(RATES)
    ]


def paired_jobs(best: dict[str, float]) -> list[Job]:
    return [
        Job(f"paired-{estimator}-{seed}", "paired", estimator, seed, lr)
        for seed in PAIRED_SEEDS
        for estimator, lr in best.items()
    ]


def other_jobs() -> list[Job]:
    """PPO with a critic; and GiGPO without KL control (measured only), with it in the loss, and in the reward."""
    ppo = {"critic": {"lr": 1e-3}, "algorithm": {"gae_per": "turn", "gamma": 0.95}}
    kinds = {
        "free": {"kl": "loss", "kl_coef": 0.0},
        "loss": {"kl": "loss", "kl_coef": 0.02, "kl_target": KL_TARGET, "kl_horizon": 80},
        "reward": {"kl": "reward", "kl_coef": 0.02, "kl_target": KL_TARGET, "kl_horizon": 80},
    }
    return [Job(f"ppo-{seed}", "ppo", "gae", seed, 1e-3, ppo) for seed in OTHER_SEEDS] + [
        Job(f"kl-{name}-{seed}", "kl", "gigpo", seed, 1e-3, {"algorithm": settings})
        for seed in OTHER_SEEDS[:2]
        for name, settings in kinds.items()
    ]


# One run.


def episodes(count: int = 4000) -> tuple[list[int], list[int]]:
    """Episodes to train on and held-out ones, each pair of start and goal once."""
    pairs: dict[tuple[Any, Any], int] = {}
    for number in range(count):
        env = GridEnv(episode=number, **WORLD)
        pairs.setdefault((env.start, env.goal), number)
    found = [pairs[pair] for pair in sorted(pairs)]
    Random(0).shuffle(found)
    return [e for i, e in enumerate(found) if i % HELD_OUT], found[::HELD_OUT]


def walks(numbers: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """What the model is taught before it learns: mostly blind walks, a sight and a move a conversation."""
    random = Random(f"taught/{seed}")
    grid = grid_of(WORLD["layout"], WORLD["size"], WORLD["walls"])
    for number in numbers * REPEATED:
        env = GridEnv(episode=number, **WORLD)
        sight = asyncio.run(env.reset())
        for _ in range(TURNS):
            good = grid.good_moves(env.at, env.goal)
            move = random.choice(good if random.random() < GUIDED else list(MOVES))
            if random.random() < REFUSED:
                sight = env.refusal(env.turns)
            said = [{"role": "user", "content": sight}, {"role": "assistant", "content": move}]
            yield {"messages": said}
            sight, _, done, _ = asyncio.run(env.step(move))
            if done:
                break


def fresh_model(folder: Path, seed: int) -> None:
    """A Llama of some 70,000 weights that knows no word yet, and a tokenizer with a token a word."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    places = [f"{axis}{i}" for axis in "xy" for i in range(WORLD["size"])]
    words = ["<|unk|>", *CONTROL, "at", "goal", *MOVES, *places]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        extra_special_tokens=CONTROL[2:],
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def warm_start(job: Job, out: Path, write: Callable[..., None]) -> None:
    import toolwise

    fresh, partial, taught = (out / "models" / f"{part}{job.seed}" for part in ("fresh-", ".taught-", "taught-"))
    for folder in (fresh, partial, taught):
        shutil.rmtree(folder, ignore_errors=True)
    fresh_model(fresh, job.seed)
    rows = list(walks(episodes()[0], job.seed))
    figures = toolwise.sft(
        str(fresh), rows, partial, steps=200, batch_tokens=1024, row_tokens=256, lr=2e-3, seed=job.seed
    )
    partial.rename(taught)  # whole, or not there
    write(rows=len(rows), loss=figures["loss"])


def settings_of(job: Job, out: Path) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(out / "models" / f"taught-{job.seed}"), "device": "cpu"},
        "data": {"batch_size": TASKS},
        "env": {"name": f"{ROOT / 'examples' / 'grid_world.py'}:GridEnv", "kwargs": {"max_turns": TURNS}},
        "rollout": {"n": ROLLOUTS, "max_new_tokens": 1},
        "multi_turn": {"max_turns": TURNS, "max_invalid_in_a_row": TURNS},
        "reward": {"function": "env"},
        "algorithm": {"adv_estimator": job.estimator},
        "actor": {"lr": job.lr, "warmup_steps": 3, "entropy_coef": 0.01},
        "validation": {"do_sample": True},
        "trainer": {"total_steps": STEPS, "console": False},
    }
    for section, values in job.changes.items():
        settings.setdefault(section, {}).update(values)
    return {"name": job.name, "seed": job.seed, "deterministic": True, **settings}


class OneWord:
    """An agent that sees the world as it is now, not how it came there, and says one token: in a grid nothing else
    matters. It stands on the policy's tokens, so that what it says is learned from as from any other."""

    def __init__(self, policy: Any, prompts: dict[str, list[int]], *, seed: int = 0, do_sample: bool = True) -> None:
        self.policy, self.prompts = policy, prompts
        self.sampling = replace(policy.sampling, do_sample=do_sample, max_new_tokens=1)
        self.seed, self.turn = seed, 0

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Any = None) -> OneWord:
        return OneWord(self.policy, self.prompts, seed=seed, do_sample=do_sample)

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        sight = observation[-1]
        if sight.content not in self.prompts:
            self.prompts[sight.content] = self.policy.chat.start([sight])
        prompt = self.prompts[sight.content]
        self.turn += 1
        said = await self.policy.generate(prompt, replace(self.sampling, seed=self.seed * 4093 + self.turn))
        word = self.policy.chat.decode(said.token_ids)
        logprobs = {
            "token_ids": said.token_ids,
            "logprobs": said.logprobs,
            "prompt_ids": prompt,
            "finish_reason": "stop",
            "policy_version": said.policy_version,
        }
        return {"type": "text", "content": word}, word, logprobs, None


async def learn(job: Job, out: Path, write: Callable[..., None]) -> None:
    """The loop of `toolwise train`, without its checkpoints: a run of a minute is sooner made again than resumed."""
    from toolwise.api import read_config, read_tasks
    from toolwise.evaluation import validate
    from toolwise.loop import train_step
    from toolwise.run import assemble
    from toolwise.summary import mean

    train, held_out = (make_rows(part, **WORLD) for part in episodes())
    often = [{**row, "task_id": f"{row['task_id']}-{i}"} for row in held_out for i in range(HELD_OUT_WALKS)]
    run = assemble(
        read_config(settings_of(job, out)),
        tasks=read_tasks(train, "train"),
        validation_tasks=read_tasks(often, "held-out"),
    )
    run = replace(run, scheduler=replace(run.scheduler, policy=OneWord(run.policy, {})))
    made, lately = 0, []

    async def held_out_success() -> float:
        return mean([s.score for s in await validate(run)])

    try:
        if not job.stop_early:
            write(step=0, rollouts=0, held_out=await held_out_success())
        for step in range(1, STEPS + 1):
            metrics = (await train_step(run)).metrics
            made += int(metrics["rollouts"])
            lately = [*lately, metrics["score/mean"]][-WINDOW:]
            kept = {k: round(v, 5) for k, v in metrics.items() if k.startswith(KEPT)}
            if not job.stop_early and step in (STEPS // 2, STEPS):
                kept["held_out"] = await held_out_success()
            write(step=step, rollouts=made, success=metrics["score/mean"], **kept)
            if job.stop_early and len(lately) == WINDOW and sum(lately) / WINDOW >= WANTED:
                break
    finally:
        run.close()


KEPT = (
    "gigpo/",
    "kl/",
    "turns/mean",
    "actor/entropy",
    "actor/grad_norm",
    "critic/explained",
    "time/step_s",
    "frac_zero",
)


def work(job: Job, out: Path) -> None:
    """One job, in a process of its own."""
    began = time.monotonic()
    path = out / "runs" / f"{job.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", buffering=1) as lines:

        def write(**line: Any) -> None:
            lines.write(json.dumps({**line, "s": round(time.monotonic() - began, 2)}) + "\n")

        write(job=asdict(job), world=WORLD, turns=TURNS, tasks=TASKS, n=ROLLOUTS, steps=STEPS)
        if job.kind == "warm":
            warm_start(job, out, write)
        else:
            asyncio.run(learn(job, out, write))
        write(done=True)


# All runs.


@dataclass(frozen=True)
class Record:
    """A finished run, as it stands on disk."""

    job: Job
    lines: list[dict[str, Any]]
    seconds: float

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Rollouts made so far, and the mean success over the last steps."""
        steps = [line for line in self.lines if "success" in line]
        smooth = [steps[max(0, i - WINDOW + 1) : i + 1] for i in range(len(steps))]
        return [(part[-1]["rollouts"], sum(p["success"] for p in part) / len(part)) for part in smooth]

    @property
    def reached(self) -> int | None:
        """Rollouts made until success was as wanted; None where it never was."""
        return next((made for made, success in self.curve[WINDOW - 1 :] if success >= WANTED), None)


def finished(out: Path) -> dict[str, Record]:
    found = {}
    for path in sorted((out / "runs").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        if lines and lines[-1].get("done"):
            found[path.stem] = Record(Job(**lines[0]["job"]), lines[1:-1], lines[-1]["s"])
    return found


def mean_rollouts(records: dict[str, Record], estimator: str, lr: float) -> float:
    own = [records[job.name] for job in sweep_jobs() if (job.estimator, job.lr) == (estimator, lr)]
    return sum(r.reached or 2 * STEPS * TASKS * ROLLOUTS for r in own) / len(own)


def best_rates(records: dict[str, Record]) -> dict[str, float] | None:
    """Of each algorithm, once the sweep is done."""
    if not all(job.name in records for job in sweep_jobs()):
        return None
    return {e: min(RATES, key=lambda lr: mean_rollouts(records, e, lr)) for e in ("grpo", "gigpo")}


def pending(out: Path) -> tuple[list[Job], bool]:
    """What can be begun now, the most urgent first; and whether that is all there will be."""
    records = finished(out)
    best = best_rates(records)
    wanted = [*(paired_jobs(best) if best else sweep_jobs()), *other_jobs()]
    seeds = sorted({job.seed for job in wanted}, key=lambda seed: (seed not in TUNING_SEEDS, seed))
    warm = [Job(f"warm-{seed}", "warm", "sft", seed) for seed in seeds]
    missing = [job for job in [*warm, *wanted] if job.name not in records]
    return [job for job in missing if job.kind == "warm" or f"warm-{job.seed}" in records], best is not None


def run_all(out: Path, jobs: int, limit_s: float) -> bool:
    """Whether everything is done. What is not done at the limit is ended, and made anew by the next call."""
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    running: dict[str, Any] = {}
    failed: set[str] = set()
    try:
        while time.monotonic() - began < limit_s:
            for name in [name for name, process in running.items() if not process.is_alive()]:
                process = running.pop(name)
                print(f"{time.monotonic() - began:6.1f} s  {name}: {process.exitcode or 'done'}", flush=True)
                if process.exitcode:
                    failed.add(name)
            ready, last = pending(out)
            ready = [job for job in ready if job.name not in failed]
            if last and not ready and not running:
                return not failed
            if failed and not ready and not running:
                return False
            for job in [job for job in ready if job.name not in running][: jobs - len(running)]:
                running[job.name] = spawn.Process(target=work, args=(job, out), name=job.name)
                running[job.name].start()
            time.sleep(0.3)
        return False
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=1e9, help="end after so many seconds; call again to go on")
    args = parser.parse_args()
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    whole = run_all(args.out, args.jobs, args.limit_s)
    records = finished(args.out)
    print(f"{len(records)} runs are whole; {'all is done' if whole else 'not all is done: call again'}")
    print(json.dumps({"best": best_rates(records), "reached": {n: r.reached for n, r in records.items() if r.curve}}))
    sys.exit(0 if whole else 75)


if __name__ == "__main__":
    main()
