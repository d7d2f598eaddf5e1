"""Synchronous against asynchronous training in a world of slow tools: `python benchmarks/async_loop.py`.

    python benchmarks/async_loop.py --json async.json --picture docs/images/async_speed.png
    python benchmarks/async_loop.py --device cuda --shape 135m
    python benchmarks/async_loop.py --staleness 2 --vary trainer.keep_cache=false trainer.keep_cache=true

Episodes have three turns. Each calls a tool whose time is log-normal, 0.2 s in the median, and 5 s in one call of a
hundred, which is the longest. On a CPU the model that ships plays, on a GPU a random one of `--shape` in bf16. All
modes train as many steps from the same weights on the same tasks, with the same tool times, one after the other, after
steps that are not counted: `--warm-up`, and two more for each version of staleness, until the batches that began
together at the start are through (on a GPU graphs are captured meanwhile). The runs would go on for longer than is
measured, so that rollouts are made at the end, too: "decoded" are the tokens that the engine wrote during a step. Both
sides share the machine's cores, so run it on an idle one: the load average is printed beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from toolwise.config.schema import RunConfig
from toolwise.envs.base import BaseEnv
from toolwise.messages import Message
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.loop import train_step
from toolwise.training.run import Run, assemble
from toolwise.types import Task

MEDIAN_S, TAIL_S, TAIL_SHARE_Z, TURNS = 0.2, 5.0, 2.326, 3
"""One in a hundred lies above 2.326 standard deviations."""
SIGMA = math.log(TAIL_S / MEDIAN_S) / TAIL_SHARE_Z
SIZES = {"cpu": {"batch": 4, "n": 4, "tokens": 24}, "cuda": {"batch": 16, "n": 8, "tokens": 64}}


class SlowWorld(BaseEnv):
    """Answers each turn after the time its tool takes; the reward is how many different words the agent used."""

    episodes: ClassVar[Counter[int]] = Counter()

    def set_seed(self, seed: int) -> None:
        self.episodes[seed] += 1
        self.chance, self.turn = random.Random(f"{seed}/{self.episodes[seed]}"), 0

    async def reset(self) -> str:
        return "Begin."

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        await asyncio.sleep(min(TAIL_S, self.chance.lognormvariate(math.log(MEDIAN_S), SIGMA)))
        self.turn += 1
        return "Go on.", float(len(set(str(action).split()))), self.turn == TURNS, {}


class WholeReplies:
    """Takes a reply that is cut off for a whole one: a random model ends none, and a cut-off one would end the episode
    before its first tool."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Any = None) -> WholeReplies:
        return WholeReplies(self.policy.session(seed=seed, do_sample=do_sample, prompt_ids=prompt_ids))

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        action, text, tokens, value = await self.policy.get_action(observation, available_tools_specs)
        return action, text, {**tokens, "finish_reason": "stop"}, value


def overrides(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Sections of the configuration, from settings such as `rollout.max_batch=8`."""
    sections: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        section, _, key = name.partition(".")
        try:
            sections.setdefault(section, {})[key] = json.loads(value)
        except json.JSONDecodeError:
            sections.setdefault(section, {})[key] = value
    return sections


def warm_up(mode: dict[str, Any], args: argparse.Namespace) -> int:
    """Steps that are not counted."""
    steps: int = args.warm_up + 2 * mode.get("max_staleness", 0)
    return steps


def build(mode: dict[str, Any], args: argparse.Namespace, model: str, varied: list[str]) -> Run:
    settings: dict[str, Any] = {
        "model": {"path": model, "device": args.device, **({} if args.device == "cpu" else {"dtype": "bfloat16"})},
        "data": {"batch_size": args.batch},
        "rollout": {"n": args.n, "max_new_tokens": args.tokens},
        "reward": {"function": "env"},
        "actor": {"lr": 1e-4 if args.device == "cpu" else 1e-6},
        "algorithm": {"zero_std_groups": "keep"},
        "multi_turn": {"max_turns": TURNS},
        "trainer": {"total_steps": warm_up(mode, args) + args.steps + 1 + mode.get("max_staleness", 0), **mode},
    }
    for section, values in overrides([*args.set, *varied]).items():
        settings[section] = {**settings.get(section, {}), **values}
    config = RunConfig.model_validate(settings)
    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=f"Question {i}?")]) for i in range(256)]
    run = assemble(config, tasks=tasks, validation_tasks=[], env=SlowWorld)
    return replace(run, scheduler=replace(run.scheduler, policy=WholeReplies(run.policy)))


async def measure(run: Run, warm_up: int, steps: int) -> tuple[float, list[dict[str, float]]]:
    """Seconds of all counted steps, and their metrics."""
    loop = None if run.tickets is None else AsyncLoop(run)
    step = train_step if loop is None else loop.train_step
    try:
        for _ in range(warm_up):
            await step(run)
        started = time.perf_counter()
        found = [dict((await step(run)).metrics) for _ in range(steps)]
        return time.perf_counter() - started, found
    finally:
        if loop is not None:
            await loop.close()


def figures(mode: dict[str, Any], args: argparse.Namespace, model: str, varied: list[str]) -> dict[str, Any]:
    """Trains in one mode."""
    SlowWorld.episodes.clear()
    run = build(mode, args, model, varied)
    try:
        seconds, steps = asyncio.run(measure(run, warm_up(mode, args), args.steps))
    finally:
        run.close()
        gc.collect()  # frees the engine's cache on a GPU

    def mean(name: str) -> float:
        values = [metrics[name] for metrics in steps if name in metrics]
        return sum(values) / len(values) if values else float("nan")

    update, rollout = mean("time/update_s"), mean("time/rollout_s")
    synchronous = mode["mode"] == "sync"
    return {
        "staleness": mode.get("max_staleness"),
        "varied": varied,
        "step_s": seconds / args.steps,
        "rollouts_per_s": sum(metrics["rollouts"] for metrics in steps) / seconds,
        "learner_waits": rollout / (rollout + update) if synchronous else mean("async/learner_wait"),
        "engine_waits": float("nan") if synchronous else mean("async/engine_wait"),
        "mean_age": mean("staleness/mean"),
        "worst_age": max(metrics.get("staleness/max", 0.0) for metrics in steps),
        "ess": mean("staleness/ess"),
        "publish_s": mean("async/publish_s"),
        "in_progress": mean("async/in_progress"),
        "logprob_gap": mean("staleness/logprob_gap"),
        "update_s": update,
        "prefilled": mean("engine/prefilled_tokens"),
        "decoded": mean("engine/decoded_tokens"),
        "turns": mean("turns/mean"),
        "limit": mean("rollout/limit"),
        "load": os.getloadavg()[0],
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Share of idle time, and rollouts per second, against the bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    bounds = [row["staleness"] or 0 for row in found]
    left.plot(bounds, [row["learner_waits"] for row in found], marker="o", label="learner waits")
    left.plot(bounds, [row["engine_waits"] for row in found], marker="o", label="engine waits")
    right.plot(bounds, [row["rollouts_per_s"] for row in found], marker="o", color="black")
    left.set_ylim(0, 1)
    right.set_ylim(bottom=0)
    for axes, label in ((left, "share of the time"), (right, "rollouts learned from per second")):
        axes.set_xlabel("max_staleness (0: synchronous)")
        axes.set_ylabel(label)
    left.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=sorted(SIZES))
    parser.add_argument("--shape", default="135m", help="on a GPU: a name in benchmarks/shapes.py")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not counted, and two per version")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--n", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--staleness", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1, help="how often each mode is measured, in turn")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="further settings of all modes")
    parser.add_argument(
        "--vary", nargs="*", default=[], metavar="SETTING=VALUE", help="asynchronous modes once with each, without sync"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--picture", type=Path, help="draw idle time and speed against staleness")
    args = parser.parse_args()
    for name, size in SIZES[args.device].items():
        setattr(args, name, getattr(args, name) or size)
    print(f"{args.device}: {args.steps} steps of {args.batch} x {args.n} episodes, load {os.getloadavg()[0]:.1f}")
    print(
        "mode         s/step  update  rollouts/s  speed-up  learner waits  engine waits  age (mean, worst)    ess"
        "  publish  prefilled  decoded  turns  |log π/μ|"
    )
    bounds: list[dict[str, Any]] = [{"mode": "async", "max_staleness": bound} for bound in args.staleness]
    modes = [(mode, [setting]) for setting in args.vary for mode in bounds]
    modes = modes or [(mode, list[str]()) for mode in ({"mode": "sync"}, *bounds)]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = "builtin:small"
        if args.device == "cuda":
            from grpo_step import make_model

            model = folder
            make_model(Path(folder), args.shape, args.device)
        for mode, varied in modes * args.rounds:
            found.append(row := figures(mode, args, model, varied))
            if args.json is not None:  # now, since a later mode may fail
                described = {"arguments": {k: str(v) for k, v in vars(args).items()}, "modes": found}
                args.json.write_text(json.dumps(described))
            name = "sync" if row["staleness"] is None else f"async, {row['staleness']}"
            age = f"{row['mean_age']:.2f}, {row['worst_age']:.0f}"
            print(
                f"{name:10} {row['step_s']:8.2f} {row['update_s']:7.2f} {row['rollouts_per_s']:11.1f}"
                f" {found[0]['step_s'] / row['step_s']:9.2f}"
                f" {row['learner_waits']:14.0%} {row['engine_waits']:13.0%} {age:>18} {row['ess']:6.3f}"
                f" {row['publish_s'] * 1e3:5.0f} ms {row['prefilled']:9.0f} {row['decoded']:8.0f} {row['turns']:6.2f}"
                f" {row['logprob_gap']:10.4f}"
                f"  {' '.join(varied)}",
                flush=True,
            )
    if args.picture is not None:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
