"""Run folders made on the spot, in the layout that the training loop writes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KINDS = {"known": 0.55, "lookup": 0.10, "arithmetic": 0.22, "two_step": 0.02}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def make_rollout(
    task_id: str,
    kind: str | None,
    right: bool,
    *,
    group_id: str = "g",
    advantage: float | None = None,
    say: str = "",
) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "Tarn"}'}}
    acts: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Tarn: height 1,204 m"},
    ]
    messages = [
        {"role": "system", "content": "Answer; reach for a tool only when you need one."},
        {"role": "user", "content": f"How high is the mountain of {task_id}?"},
        *(acts if right else []),
        {"role": "assistant", "content": say or ("1,204 m" if right else "I believe 900 m.")},
    ]
    return {
        "rollout_id": f"{group_id}-{task_id}-{right}",
        "group_id": group_id,
        "task_id": task_id,
        "kind": kind,
        "messages": messages,
        "ground_truth": "1204",
        "score": 1.0 if right else 0.0,
        "metrics": {"correct": 1.0 if right else 0.0},
        "reason": None,
        "stop_reason": "answered",
        "cost": 1.0 if right else 0.0,
        "calls": {"lookup": 1} if right else {},
        "steps": [{"advantage": advantage, "base_reward": 0.0, "tokens": 12}] * (2 if right else 1),
    }


def _figures(progress: float) -> dict[str, Any]:
    kinds = {k: {"correct": b + (0.93 - b) * progress, "cost": 1.6 - progress, "n": 16} for k, b in KINDS.items()}
    mean = {f: sum(k[f] for k in kinds.values()) / len(kinds) for f in ("correct", "cost")}
    return {
        "score": mean["correct"] - 0.1 * mean["cost"],
        **mean,
        "tokens": 90 - 40 * progress,
        "by_kind": kinds,
        "n": 64,
    }


def _eval_line(step: int, figures: dict[str, Any], kinds: bool) -> dict[str, Any]:
    line = {"step": step} | {f"eval/{name}": figures[name] for name in ("score", "correct", "cost")}
    if kinds:
        line |= {f"eval/{k}/{f}": v[f] for k, v in figures["by_kind"].items() for f in ("correct", "cost")}
    return line


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(
        name: str = "first-run", *, steps: int = 60, seed: int = 0, finished: bool = True, kinds: bool = True
    ) -> Path:
        run, draw = tmp_path / name, random.Random(seed)
        lines: list[dict[str, Any]] = []
        for step in range(steps + 1):
            progress = 1 / (1 + math.exp(-(step - 24 - 2 * draw.random()) / 6))
            if step > 0:
                at = _figures(progress)
                noisy = min(1.0, max(0.0, at["correct"] + draw.gauss(0, 0.07)))
                lines.append(
                    {
                        "step": step,
                        "score/mean": noisy - 0.1,
                        "correct/mean": noisy,
                        "cost/mean": at["cost"] + draw.gauss(0, 0.06),
                        "calls/mean": at["cost"],
                        "tokens/sampled": 2048.0,
                        "time/tokens_per_s": 900 + draw.gauss(0, 40),
                        "actor/loss": draw.gauss(0, 0.02),
                        "actor/grad_norm": 0.4 + draw.random(),
                        "actor/entropy": 0.9 - 0.6 * progress,
                        "actor/clip_frac": 0.03 * draw.random(),
                        "frac_zero_std": 0.4 * progress,
                        "time/step_s": 2.4,
                    }
                )
            if step % 10 == 0:
                lines.append(_eval_line(step, _figures(progress), kinds))
        write_lines(run / "metrics.jsonl", lines)
        (run / "config.toml").write_text('seed = 0\n[data]\ntrain = "tasks.jsonl"\n', "utf-8")
        names = [(f"task-{i:02}", list(KINDS)[i % 4] if kinds else None) for i in range(24)]
        write_lines(
            run / "rollouts" / "eval-000000.jsonl",
            [make_rollout(t, k, i < 3) for i, (t, k) in enumerate(names)],
        )
        if finished:
            write_lines(
                run / "rollouts" / f"eval-{steps:06}.jsonl",
                [make_rollout(t, k, 2 <= i < 20) for i, (t, k) in enumerate(names)],
            )
            summary = {
                "before": _figures(0.02),
                "after": _figures(0.97),
                "seconds": 151.0,
                "peak_rss_mb": 812.0,
            }
            if not kinds:
                summary = {k: v | {"by_kind": {}} if isinstance(v, dict) else v for k, v in summary.items()}
            (run / "summary.json").write_text(json.dumps(summary | {"steps": steps, "seed": seed}), "utf-8")
        training = [
            make_rollout(f"train-{g}", "lookup", i % 2 == 0, group_id=f"g{g}", advantage=0.9 if i % 2 == 0 else -1.1)
            for g in range(3)
            for i in range(4)
        ]
        write_lines(run / "rollouts" / f"step-{steps:06}.jsonl", training)
        return run

    return make
