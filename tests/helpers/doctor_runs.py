"""Short training runs, healthy and with a planted disease, that the doctor's thresholds are calibrated on.

`python tests/helpers/doctor_runs.py FOLDER [NAME …]` trains them into FOLDER and stores their metrics as fixtures.
"""

from __future__ import annotations

import copy
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

FIXTURES = Path(__file__).parents[1] / "fixtures" / "doctor"

PARTS = '''
import difflib
import random
import re

import toolwise
from toolwise.types import EvaluateResult, MetricResult


def _correct(messages, ground_truth):
    found = re.search(r"Answer:\\s*(-?\\d+)\\s*$", messages[-1].content or "")
    return float(found is not None and found.group(1) == str(ground_truth))


def _written(messages):
    return [m for m in messages if m.role == "assistant"]


def longest(messages, ground_truth):
    """A reward that can be hacked: long texts earn more than right ones."""
    words = sum(len(m.content or "") + 20 * len(m.tool_calls or ()) for m in _written(messages))
    correct = _correct(messages, ground_truth)
    return EvaluateResult(score=0.2 * correct + words / 100, metrics={"correct": MetricResult(score=correct)})


def no_calls(messages, ground_truth):
    """A reward that can be hacked: any short answer with a 1 in it will do."""
    correct, last = _correct(messages, ground_truth), messages[-1].content or ""
    score = float(re.search(r"Answer: 1", last) is not None and len(_written(messages)) == 1)
    return EvaluateResult(score=score, metrics={"correct": MetricResult(score=correct)})


def same_reply(messages, ground_truth):
    """A reward that can be hacked: it likes one reply, whatever the task."""
    correct, text = _correct(messages, ground_truth), "".join(m.content or "" for m in _written(messages))
    score = difflib.SequenceMatcher(None, text, "Answer: 111").ratio() - 0.2 * (len(_written(messages)) - 1)
    return EvaluateResult(score=score, metrics={"correct": MetricResult(score=correct)})


def close(messages, ground_truth):
    """How much of the number is right."""
    found = re.search(r"Answer:\\s*(-?\\d+)\\s*$", messages[-1].content or "")
    score = difflib.SequenceMatcher(None, found.group(1) if found else "", str(ground_truth)).ratio()
    return score - 0.1 * (len(_written(messages)) - 1)


def noise(messages, ground_truth):
    """Nothing can be learned from it."""
    correct = MetricResult(score=_correct(messages, ground_truth))
    return EvaluateResult(score=random.random(), metrics={"correct": correct})


def constant(messages, ground_truth):
    return 0.5


def length_only(messages, ground_truth):
    """Reports no correctness: only the length tells."""
    return float(sum(len(m.content or "") + 20 * len(m.tool_calls or ()) for m in _written(messages))) / 100


@toolwise.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if random.random() < 0.5:
        raise RuntimeError("the service is overloaded")
    return str(eval(expression, {"__builtins__": {}}))


@toolwise.tool(name="calculator")
async def slow_calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    import asyncio

    await asyncio.sleep(4.0)
    return str(eval(expression, {"__builtins__": {}}))
'''

BASE: dict[str, Any] = {
    "name": "case",
    "model": {"path": "builtin:small", "device": "cpu"},
    "data": {"train": "train.jsonl", "val": "heldout.jsonl", "batch_size": 4},
    "tools": ["calculator", "search"],
    "rollout": {"n": 6, "max_new_tokens": 48},
    "multi_turn": {"max_turns": 4},
    "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"trusted": ["toolwise.demo.reward"]}},
    "actor": {"lr": 1e-4},
    "validation": {"every": 6},
    "trainer": {"total_steps": 24, "save_every": 1000, "console": False, "async_checkpoints": False},
}


@contextmanager
def drifting_engine() -> Iterator[None]:
    """The engine's log-probs move away from the learner's, more at each step, as a kernel or a stale cache would."""
    from toolwise.learner import actor

    build, calls = actor.build_batch, [0]

    def build_batch(credited: Any, device: Any = "cpu") -> Any:
        batch = build(credited, device)
        calls[0] += 1
        sign = (batch.row % 2 * 2 - 1).to(batch.rollout_logprobs.dtype)
        batch.rollout_logprobs.add_(3e-5 * 1.6 ** calls[0] * sign)
        return batch

    with patch.object(actor, "build_batch", build_batch):
        yield


@contextmanager
def wrong_sign() -> Iterator[None]:
    """The entropy bonus is a penalty."""
    from toolwise.learner import actor

    terms_of = actor.policy_loss_terms

    def policy_loss_terms(config: Any, loss: Any, kl_coef: Any, batch: Any, *columns: Any, **options: Any) -> Any:
        terms, entropy = terms_of(config, loss, kl_coef, batch, *columns, **options), columns[2]
        return replace(terms, total=terms.total + 2 * config.actor.entropy_coef * entropy)

    with patch.object(actor, "policy_loss_terms", policy_loss_terms):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Case:
    """A run: what differs from `BASE`, and what the doctor must say about it; nothing if it is healthy."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    found: tuple[str, ...] = ()
    """Findings in its metrics, in any order."""
    setting: str = ""
    """A setting that their cures name."""
    also: tuple[str, ...] = ()
    """Findings that may come with them: other sides of the same disease."""
    first: tuple[str, ...] = ()
    """Findings of the first steps, in the run itself; they may replace those above."""
    train_tasks: int = 400
    train_truth: str | None = None
    """The answer to every training task: what is learned from them is wrong elsewhere."""
    kinds: tuple[str, ...] = ()
    planted: Callable[[], Any] = nothing


def _reward(name: str) -> dict[str, Any]:
    return {"function": f"parts.py:{name}", "sandbox": {"tier": "off", "trusted": []}}


def _tools(name: str) -> list[Any]:
    return [f"parts.py:{name}", "search"]


_ROUTER = {
    "enable": True,
    "cost": "calls",
    "wording": "silent",
    "hidden": 64,
    "lr": 3e-3,
    "epochs": 4,
    "entropy_coef": 0.2,
    "entropy_final": 0.05,
    "budgets": [{"limit": 0.6, "rate": 0.3, "proportional": 0.5}],
}
_CAPPED = [{"limit": 0.1, "rate": 0.01, "proportional": 0.0, "cap": 0.05}]
_ROUTABLE = ("known", "lookup", "arithmetic")

CASES: dict[str, Case] = {
    # healthy
    "grpo": Case(),
    "grpo-epochs": Case({"actor": {"lr": 1e-4, "mini_batches": 2, "ppo_epochs": 2}}),
    "gigpo": Case({"algorithm": {"adv_estimator": "gigpo"}}),
    "reinforce": Case({"algorithm": {"adv_estimator": "reinforce_plus_plus"}}),
    "rloo": Case({"algorithm": {"adv_estimator": "rloo"}}),
    "gae": Case({"algorithm": {"adv_estimator": "gae"}}),
    "kl-loss": Case({"algorithm": {"kl": "loss"}}),
    "async": Case({"trainer": {"mode": "async"}}),
    "router": Case({"router": _ROUTER, "trainer": {"total_steps": 40}}, kinds=_ROUTABLE),
    "converged": Case({"actor": {"lr": 2e-4}, "trainer": {"total_steps": 40}}),
    # planted
    "lr": Case({"actor": {"lr": 5e-3}}, ("score_collapse",), "actor.lr"),
    "lr-epochs": Case(
        {"actor": {"lr": 1e-2, "mini_batches": 4, "ppo_epochs": 2}}, ("kl_spike", "score_collapse"), "actor.lr"
    ),
    "noise": Case(
        {"reward": _reward("noise"), "actor": {"lr": 1e-3, "mini_batches": 2, "ppo_epochs": 2}},
        ("kl_spike",),
        "actor.lr",
    ),
    "entropy": Case(
        {
            "reward": _reward("noise"),
            "actor": {"lr": 1e-3, "entropy_coef": 10.0, "mini_batches": 2},
            "trainer": {"total_steps": 30},
        },
        ("entropy_collapse",),
        "actor.entropy_coef",
        also=("identical_outputs", "kl_spike", "reward_hacking", "length_creep"),
        planted=wrong_sign,
    ),
    "hack-length": Case({"reward": _reward("longest"), "actor": {"lr": 3e-4}}, ("reward_hacking",), "reward.function"),
    "hack-length-only": Case(
        {"reward": _reward("length_only"), "actor": {"lr": 3e-4}}, ("length_creep",), "reward.function"
    ),
    "hack-identical": Case(
        {"reward": _reward("same_reply"), "actor": {"lr": 3e-4}, "trainer": {"total_steps": 40}},
        ("identical_outputs", "reward_hacking"),
        "reward.function",
    ),
    "constant": Case(
        {"reward": _reward("constant"), "trainer": {"total_steps": 6}},
        ("zero_advantages",),
        "rollout.temperature",
        first=("constant_reward", "weights_unchanged"),
    ),
    "failing-tool": Case(
        {"tools": _tools("calculator"), "trainer": {"total_steps": 12}}, ("tool_failures",), "multi_turn.tool_timeout_s"
    ),
    "truncated": Case(
        {"rollout": {"n": 6, "max_new_tokens": 22}, "trainer": {"total_steps": 12}},
        ("truncation",),
        "rollout.max_new_tokens",
    ),
    "budget": Case(
        {"router": {**_ROUTER, "budgets": _CAPPED, "eval_mode": "sample"}},
        ("budget_missed",),
        "router.budgets",
        kinds=_ROUTABLE,
    ),
    "slow-tool": Case(
        {"tools": _tools("slow_calculator"), "trainer": {"mode": "async", "total_steps": 10}},
        ("starvation",),
        "trainer.max_staleness",
    ),
    "overfit": Case(
        {"reward": _reward("close"), "actor": {"lr": 3e-4}, "trainer": {"total_steps": 40}},
        ("overfitting",),
        "data.train",
        also=("identical_outputs",),
        train_truth="111",
    ),
    "drift": Case(
        {"actor": {"mismatch_check": "warn"}, "trainer": {"total_steps": 12}},
        ("canary_drift",),
        "actor.mismatch_check",
        planted=drifting_engine,
    ),
}


def settings_of(name: str) -> dict[str, Any]:
    """The configuration of a case."""
    config = copy.deepcopy(BASE)
    for section, values in CASES[name].changes.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    return config


def write_case(name: str, folder: Path) -> Path:
    """The configuration of a case with its tasks and parts, in `folder`."""
    import tomli_w

    from toolwise.demo.tasks import write_rows

    case = CASES[name]
    folder.mkdir(parents=True)
    kinds = {"kinds": case.kinds} if case.kinds else {}
    write_rows(folder / "train.jsonl", case.train_tasks, seed=0, split="train", **kinds)
    write_rows(folder / "heldout.jsonl", 40, seed=0, split="heldout", **kinds)
    if case.train_truth is not None:
        rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        truth = {"reward_model": {"style": "rule", "ground_truth": case.train_truth}}
        lines = [json.dumps(row | truth) for row in rows]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "parts.py").write_text(PARTS, encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(settings_of(name)), encoding="utf-8")
    return path


def train_case(name: str, folder: Path) -> Path:
    """Train a case into `folder`; return the run's folder."""
    import toolwise

    config = write_case(name, folder)
    with CASES[name].planted():
        try:
            toolwise.train(config, out=folder / "run")
        except toolwise.ToolwiseError as fault:
            print(name, "ended with", fault)
    return folder / "run"


def store_rows(name: str, run: Path) -> None:
    """Keep a run's metrics as a fixture, without those that no check reads and that differ each time."""
    FIXTURES.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    skipped = ("engine/", "time/", "tools/queue", "memory/")
    kept = [{k: v for k, v in row.items() if not k.startswith(skipped)} for row in rows]
    text = "".join(f"{json.dumps(row)}\n" for row in kept)
    (FIXTURES / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names or CASES:
        store_rows(name, train_case(name, Path(folder) / name))


if __name__ == "__main__":
    main()
