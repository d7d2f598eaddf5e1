"""RLLA end to end with the router: prepare, label, train router and actor, evaluate, and the frontier's classifier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from toolwise import api
from toolwise.agent.loader import load_router
from toolwise.cli import app
from toolwise.config.schema import RunConfig, load_config
from toolwise.data import load_tasks
from toolwise.frontier.baselines import classifier_candidates, training_rows
from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.protocols import Router
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.cost import usage_of_messages
from toolwise.routing.learned_router import LearnedRouter, target_of
from toolwise.training.run import assemble
from toolwise.training.trainer import RunResult, Training
from toolwise.types import Task, Usage

torch.set_num_threads(1)

DATA = Path(__file__).parents[1] / "fixtures"
EXAMPLE = Path(__file__).parents[2] / "examples" / "rlla_router.toml"
WANTED = {"ANSWER": 1, "SEARCH-FAMILY": 3, "CALCULATE-FAMILY": 1, "MIXED": 1}


def command(*words: Any) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@cache
def shortest() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of the published rows the shortest of each label, to train on; and four to be tested on."""
    from toolwise.data.files import read_rows
    from toolwise.data.rows import read_task
    from toolwise.routing.families import heuristic_target

    def shape(row: dict[str, Any]) -> dict[str, Any]:
        prompt = [
            {"role": "system", "content": row["instruction"]},
            {"role": "user", "content": row["input"]},
        ]
        return {"prompt": prompt, "ground_truth": row["output"]}

    rows = sorted(read_rows(DATA / "rlla_sft.json"), key=lambda row: len(row["instruction"] + row["input"]))
    kept: dict[str, list[dict[str, Any]]] = {label: [] for label in WANTED}
    for number, row in enumerate(rows):
        label = str(heuristic_target(read_task(DATA / "rlla_sft.json", number, shape(row), {})))
        if len(kept[label]) < WANTED[label]:
            kept[label].append(row)
    held_out = sorted(read_rows(DATA / "rlla_test.parquet"), key=lambda row: len(str(row["prompt"])))[:4]
    return [row for members in kept.values() for row in members], held_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `data prepare` and `data label` make of published rows, beside a copy of the example."""
    train, test = shortest()
    (tmp_path / "published").mkdir()
    for name, rows in (("rlla_sft.json", train), ("test.json", test)):
        (tmp_path / "published" / name).write_text(json.dumps(rows), encoding="utf-8")
    command("data", "prepare", "rlla", tmp_path / "published/rlla_sft.json", "--out", tmp_path / "rlla/train.parquet")
    command("data", "prepare", "rlla", tmp_path / "published/test.json", "--out", tmp_path / "rlla/test.parquet")
    told = command("data", "label", tmp_path / "rlla/train.parquet", "--heuristic")
    assert all(f"{label} {count}" in " ".join(told.split()) for label, count in WANTED.items())
    (tmp_path / "rlla_router.toml").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def few_steps(folder: Path, *more: str) -> RunConfig:
    small = ("data.batch_size=3", "rollout.max_new_tokens=20", "trainer.total_steps=2", "trainer.console=false")
    # λ begins above 0: the model that ships hardly ever writes a call here, and a λ of 0 would stay where it is.
    budget = "router.budgets=[{limit = 0.5, initial = 1.0, rate = 0.1, proportional = 0.0}]"
    settings = (*small, budget, "actor.lr=1e-3", "deterministic=true", "reward.sandbox.tier=off", *more)
    return load_config(folder / "rlla_router.toml", settings)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
def test_the_whole_way(folder: Path) -> None:
    run = assemble(few_steps(folder))
    before = [w.detach().clone() for w in run.learner.model.parameters()]
    result = asyncio.run(Training(run, folder / "run", resume=False).run_training())
    steps = [line for line in lines(folder / "run/metrics.jsonl") if "router/prompts" in line]
    check_labels(run.batches.tasks, steps)
    check_costs(folder / "run", steps)
    assert run.router.model.head.out.weight.abs().max() > 0
    assert any(not torch.equal(a, b) for a, b in zip(run.learner.model.parameters(), before, strict=True))
    assert all(line["actor/updates"] == 1 and line["router/updates"] == 1 for line in steps)
    check_evaluation(folder, result)
    routing = load_router(folder / "run")
    train, _ = training_rows(routing, None)  # the labels are the run's own
    words, _ = classifier_candidates(routing, train, load_tasks(folder / "rlla/test.parquet"))
    assert {name: [each.values.shape for each in word.values()] for name, word in words.items()} == {
        "classifier": [(4, 3)]
    }


def check_labels(tasks: Sequence[Task], steps: Sequence[dict[str, Any]]) -> None:
    assert sorted(str(target_of(task)) for task in tasks) == sorted(k for k, n in WANTED.items() for _ in range(n))
    assert all(task.extra_info["tool_families"] for task in tasks)
    assert sum(line["router/prompts"] * line["router/mixed_share"] for line in steps) == pytest.approx(1)
    for line in steps:
        assert sum(line[f"router/share/{route}"] for route in WANTED if route != "MIXED") == pytest.approx(1)
        assert [line[f"router/rollouts/{route}"] for route in WANTED if route != "MIXED"] == [6.0] * 3
        assert line["router/label_loss"] > 0


def check_costs(out: Path, steps: Sequence[dict[str, Any]]) -> None:
    """Costs are those of what was written; λ follows from them by the plain rule."""
    price = 1.0
    for line in steps:
        records = lines(out / "rollouts" / f"step-{line['step']:06d}.jsonl")
        written = [
            usage_of_messages([Message(role="assistant", content=r["messages"][-1]["content"])], {}) for r in records
        ]
        assert [r["cost"] for r in records] == [float(usage.used_any_tool) for usage in written]
        assert [sum(r["calls"].values()) for r in records] == [sum(u.calls_by_tool.values()) for u in written]
        assert line["cost/mean"] == pytest.approx(sum(r["cost"] for r in records) / len(records))
        price = max(0.0, price + 0.1 * (line["router/cost/mean"] - 0.5))
        assert line["router/cost/lambda"] == pytest.approx(price)
        assert line["router/cost/gap"] == pytest.approx(line["router/cost/mean"] - 0.5)


def check_evaluation(folder: Path, result: RunResult) -> None:
    """The run's own validation, and the same again from its checkpoint, with the head that lies there."""
    after = result.summary["after"]
    assert after["n"] == 4
    assert sum(value for name, value in after.items() if name.endswith("/share")) == pytest.approx(1)
    again = json.loads(command("eval", folder / "run", "--json", "--set", "router.eval_mode=argmax"))
    model = folder / "run/checkpoints/step-000002/model"
    config = few_steps(folder, "router.eval_mode=argmax", f"model.path={json.dumps(str(model))}")
    run = assemble(config.model_copy(update={"router": config.router.model_copy(update={"warm_start_epochs": 0})}))
    assert isinstance(run.router, LearnedRouter)
    run.router.load(model)
    assert run.router.budgets.lambdas == {"cost": pytest.approx(0.9, abs=0.1)}
    best = [d.route for d in run.router.decide(run.validation_tasks, 1, 0, explore=False)]
    assert again["n"] == 4
    for route in set(best):
        assert again[f"route/{route}/share"] == best.count(route) / 4


def test_a_model_without_a_router_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = few_steps(folder, "rollout.max_new_tokens=2")
    figures = api.evaluate("builtin:small", load_tasks(folder / "rlla/test.parquet")[:1], config=config)
    assert figures["n"] == 1
    assert "builtin:small has no router" in caplog.text


def test_gold_replies_cost_what_their_calls_do(folder: Path) -> None:
    """Nothing executes, so the tools' own account is empty: the text is what counts, blocks nobody can read too."""
    run = assemble(few_steps(folder, "router.cost=family"))
    tasks = [*run.batches.tasks]
    said = [task.ground_truth for task in tasks] + ["<tool_call>\nno call at all\n</tool_call>", "a plain answer"]
    told = [counted(run.router, task, text) for task, text in zip([*tasks, tasks[0], tasks[0]], said, strict=True)]
    for task, usage in zip(tasks, told, strict=False):
        target = str(target_of(task))
        assert (usage.cost > 0) == (target != "ANSWER")
        assert (usage.cost == 0) == (not usage.calls)
    assert told[-2].calls == {"unreadable": 1}
    assert (told[-2].cost, told[-1].cost) == (1.0, 0.0)


def counted(router: Router, task: Task, text: str) -> Usage:
    """The usage of a rollout that consists of `text`."""
    scheduler = RolloutScheduler(ScriptedPolicy([text], parser="none"), {}, max_episode_steps=1)
    (rollout,) = asyncio.run(scheduler.roll_out(router.decide([task], 1, 0, explore=False)))
    return rollout.usage
