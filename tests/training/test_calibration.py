"""Calibration tasks: set aside by the seed, never learned from, and what a run makes of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolwise.agent.agent import RoutedAgent
from toolwise.agent.export import export_model
from toolwise.agent.loader import load_router
from toolwise.api import evaluate
from toolwise.cli.evaluate import warn_about_calibration_tasks
from toolwise.config.schema import RunConfig
from toolwise.data import load_tasks
from toolwise.demo.tasks import make_rows
from toolwise.errors import ConfigError
from toolwise.routing.calibration import KEY
from toolwise.routing.head.head import load_head
from toolwise.routing.learned_router import LearnedRouter
from toolwise.training import checkpoint
from toolwise.training.calibration import (
    MAX_ROWS,
    MIN_ROWS,
    begin_calibration,
    budget_metrics,
    calibrate,
    calibrate_run,
    expected_errors,
    recorded_split,
    split_tasks,
)
from toolwise.training.run import Run, assemble
from toolwise.training.trainer import Training
from toolwise.types import EvaluateResult, ScoredRollout, Task
from toolwise.view.report import write_report

torch.set_num_threads(1)


def config(folder: Path, *, tasks: int = 256, sections: dict[str, Any] | None = None, **router: Any) -> RunConfig:
    data = folder / f"tasks-{tasks}.jsonl"
    if not data.exists():
        rows = [row | {"router_target_action": "ANSWER"} for row in make_rows(tasks, seed=0, split="train")]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig.model_validate(
        {
            "deterministic": True,
            "data": {"train": str(data), "batch_size": 2},
            "tools": ["calculator", "search"],
            "rollout": {"n": 3, "max_new_tokens": 24},
            "multi_turn": {"max_turns": 2},
            "reward": {
                "function": "toolwise.demo.reward:small_world_reward",
                "kwargs": {"price_per_call": 0.0},
                "sandbox": {"tier": "off"},
            },
            "trainer": {"total_steps": 2, "save_every": 1, "console": False},
            "validation": {"before": False},
            "router": {
                "enable": True,
                "train_actor": False,
                "lr": 0.05,
                "wording": "silent",
                "cost": "calls",
                "calibration_rollouts": 8,
                "budgets": [{"limit": 0.2}],
                **router,
            },
            **(sections or {}),
        }
    )


def plain(count: int) -> list[Task]:
    return [Task(task_id=str(i), prompt=[{"role": "user", "content": f"What is {i}?"}]) for i in range(count)]


def settings(share: float = 0.1, seed: int = 0, batch_size: int = 4, **router: Any) -> RunConfig:
    section = {"enable": True, "calibration": share, "budgets": [{"limit": 0.5}], **router}
    return RunConfig.model_validate({"seed": seed, "data": {"batch_size": batch_size}, "router": section})


@pytest.mark.parametrize(("tasks", "share", "aside"), [(1000, 0.1, 100), (300, 0.1, MIN_ROWS), (9000, 0.5, MAX_ROWS)])
def test_a_share_of_the_tasks_within_bounds_is_set_aside(tasks: int, share: float, aside: int) -> None:
    split = split_tasks(settings(share), plain(tasks))
    assert (len(split.train), len(split.calibration)) == (tasks - aside, aside)
    ids = [task.task_id for task in (*split.train, *split.calibration)]
    assert sorted(ids, key=int) == [str(i) for i in range(tasks)]


def test_the_seed_chooses_them() -> None:
    chosen = [{task.task_id for task in split_tasks(settings(seed=s), plain(1000)).calibration} for s in (0, 0, 1)]
    assert chosen[0] == chosen[1]
    assert len(chosen[0] & chosen[2]) < 40


@pytest.mark.parametrize(
    ("share", "tasks", "router", "said"),
    [
        (0.0, 1000, {}, "router.calibration is 0"),
        (0.1, 100, {}, "100 training tasks are too few"),
        (0.1, 1000, {"budgets": []}, ""),
        (0.1, 1000, {"enable": False}, ""),
    ],
)
def test_nothing_is_set_aside_without_budgets_or_of_few_tasks(
    share: float, tasks: int, router: dict[str, Any], said: str
) -> None:
    split = split_tasks(settings(share, **router), plain(tasks))
    assert (len(split.train), len(split.calibration)) == (tasks, 0)
    assert split.note.startswith(said)
    assert bool(split.note) == bool(said)


def test_a_split_that_leaves_less_than_a_batch_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"sets 294 of 300 training tasks aside, which leaves 6, fewer than data\.batch"
    ):
        split_tasks(settings(0.98, batch_size=8), plain(300))
    with pytest.raises(ValueError, match="less than 1"):
        settings(1.0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("calibrated")
    run = assemble(config(folder, warm_start_epochs=1), validation_tasks=load_tasks(folder / "tasks-256.jsonl")[:6])
    result = asyncio.run(Training(run, folder / "run", resume=False).run_training())
    return folder, run, result.summary


def test_calibration_tasks_are_never_learned_from(finished: tuple[Path, Run, dict[str, Any]]) -> None:
    folder, run, _ = finished
    aside = {task.task_id for task in run.calibration.calibration}
    assert len(aside) == MIN_ROWS
    assert isinstance(run.router, LearnedRouter)
    assert aside.isdisjoint(task.task_id for task in run.batches.tasks)
    assert aside.isdisjoint(task.task_id for task in run.router.tasks)  # of the warm start
    rolled_out = [json.loads(line) for file in (folder / "run/rollouts").glob("step-*.jsonl") for line in file.open()]
    assert rolled_out
    assert aside.isdisjoint(record["task_id"] for record in rolled_out)
    assert recorded_split(folder / "run") == aside


def test_the_run_reports_the_split_and_what_it_delivers(finished: tuple[Path, Run, dict[str, Any]]) -> None:
    folder, run, summary = finished
    calibration = summary["calibration"]
    assert (calibration["tasks"], calibration["rolled_out"], calibration["step"]) == (MIN_ROWS, 8, 2)
    assert calibration["expected_standard_errors"]["cost"] == pytest.approx((0.2 * 0.8 / MIN_ROWS) ** 0.5)
    assert calibration["units"]["cost"]["limit"] == 0.2
    assert calibration["units"]["cost"]["cost"] <= 0.2 + 1e-9
    after = summary["after"]
    assert after["budget/cost/limit"] == 0.2
    assert after["budget/cost/delivered"] == pytest.approx(after["cost"])
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    (validated,) = [line for line in lines if "eval/score" in line]
    assert {"calibration/cost/cost", "calibration/cost/stderr", "calibration/score", "eval/budget/score"} <= set(
        validated
    )
    write_report(folder / "run")
    assert f"delivered cost {after['cost']:.3f} [" in (folder / "run/report.html").read_text()
    assert isinstance(run.router, LearnedRouter)
    assert expected_errors(run.router, run.calibration.calibration) == calibration["expected_standard_errors"]


def test_checkpoints_exports_and_agents_carry_the_newest_calibration(
    finished: tuple[Path, Run, dict[str, Any]],
) -> None:
    folder, run, _ = finished
    assert isinstance(run.router, LearnedRouter)
    steps = {}
    for path in sorted((folder / "run/checkpoints").glob("step-*")):
        _, metadata = load_head(path / "model")
        steps[path.name] = metadata.get(KEY, {}).get("step")
    assert steps == {"step-000001": None, "step-000002": 2}  # validated after the last step only
    exported = export_model(folder / "run", folder / "exported")
    for source, tools in ((folder / "run", None), (exported.out, ["calculator", "search"])):
        assert load_router(source, tools=tools).trained == run.router.calibration


def test_eval_uses_the_thresholds_and_says_what_was_delivered(
    finished: tuple[Path, Run, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, run, summary = finished
    model = checkpoint.latest(folder / "run/checkpoints")
    assert model is not None
    tasks = load_tasks(folder / "tasks-256.jsonl")[:6]
    measured = evaluate(model.path / "model", tasks, config=run.config)
    names = ("score", "cost", "budget/cost/delivered", "budget/cost/limit", "budget/cost/stderr")
    assert [measured[name] for name in names] == [summary["after"][name] for name in names]
    assert "not calibrated" not in caplog.text
    evaluate(checkpoint.load(folder / "run/checkpoints/step-000001").path / "model", tasks[:1], config=run.config)
    assert "this router is not calibrated: routes are sampled" in caplog.text


def test_the_same_question_gets_the_same_route_from_every_agent_and_seed(
    finished: tuple[Path, Run, dict[str, Any]],
) -> None:
    folder, run, _ = finished
    agents = [RoutedAgent.load(folder / "run") for _ in range(2)]
    tasks = load_tasks(folder / "tasks-256.jsonl")[:12]
    routes = []
    for seed, agent in enumerate(agents):
        predictions = agent.routing.predict(tasks)
        routes.append(
            [agent.routing.choose(p, t, budget=None, seed=seed) for p, t in zip(predictions, tasks, strict=True)]
        )
    assert routes[0] == routes[1]
    validated = run.router.decide(tasks, 1, 5, label="eval", explore=False)
    assert [decision.route for decision in validated] == [route.value for route in routes[0]]
    asked = [agent.ask(list(tasks[0].prompt), seed=seed).route for seed, agent in enumerate(agents)]
    assert set(asked) == {routes[0][0].value}


@pytest.mark.long
def test_a_resumed_run_has_the_same_split_and_calibration(tmp_path: Path) -> None:
    sections = {"trainer": {"total_steps": 2, "save_every": 1, "console": False}}
    sections["validation"] = {"before": False, "every": 1}
    tables = []
    for steps in ([2], [1, 2]):
        out = tmp_path / f"run-{len(steps)}"
        for number, total in enumerate(steps):
            sections["trainer"]["total_steps"] = total
            run = assemble(config(tmp_path, sections=sections))
            asyncio.run(Training(run, out, resume=number > 0).run_training())
            assert isinstance(run.router, LearnedRouter)
        tables.append((sorted(recorded_split(out)), run.router.calibration))
    assert tables[0] == tables[1]
    restored = assemble(config(tmp_path, sections=sections))
    restored.registry().load_state_dict(checkpoint.load(out / "checkpoints/step-000001").state())
    assert isinstance(restored.router, LearnedRouter)
    assert restored.router.calibration is not None
    assert restored.router.calibration.step == 1


def test_a_budget_that_nothing_meets_is_said_with_the_least_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LearnedRouter.costs_of
    monkeypatch.setattr(LearnedRouter, "costs_of", lambda self, rollout: {"cost": 0.75 + real(self, rollout)["cost"]})
    run = assemble(config(tmp_path))
    with caplog.at_level("WARNING"):
        asyncio.run(Training(run, tmp_path / "run", resume=False).run_training())
    assert "the budget of 0.2 in 'cost' cannot be met: the cheapest routes cost 0.750; raise the limit" in caplog.text


def test_a_random_budget_that_nothing_meets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default budget, 0.8, is met."""
    real = LearnedRouter.costs_of
    monkeypatch.setattr(LearnedRouter, "costs_of", lambda self, rollout: {"cost": 0.5 + real(self, rollout)["cost"]})
    run = assemble(config(tmp_path, budgets=[{"limit": 0.8}], random_budgets={"low": 0.2, "high": 0.8, "bins": 2}))
    _, said = asyncio.run(calibrate_run(run, run.calibration.calibration, step=1))
    assert said == "the budget of 0.2 in 'cost' cannot be met: the cheapest routes cost 0.500; raise the limit"
    _, again = asyncio.run(calibrate_run(run, run.calibration.calibration, step=2))
    assert again == ""


def test_how_few_tasks_each_told_budget_is_calibrated_on_is_said(tmp_path: Path) -> None:
    bins = {"low": 0.2, "high": 0.8, "bins": 2}
    run = assemble(config(tmp_path, budgets=[{"limit": 0.8}], random_budgets=bins, budget_prompt=True))
    said = begin_calibration(run, run.calibration, tmp_path)
    assert "8 of them rolled out under every route (4 for each of the 2 budgets that agents are told) at" in said


@pytest.mark.parametrize("mode", ["policy", "value"])
def test_several_budgets_and_either_head_are_calibrated(tmp_path: Path, mode: str) -> None:
    limits = [{"limit": 0.05, "unit": "search"}, {"limit": 0.1, "unit": "calculate"}]
    run = assemble(config(tmp_path, mode=mode, budgets=limits))
    assert isinstance(run.router, LearnedRouter)
    with torch.no_grad():  # routes that differ between prompts
        run.router.model.head.out.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    latest = asyncio.run(calibrate(run, run.router, run.calibration.calibration, 8, step=3))
    assert latest is not None
    assert latest.units == ("search", "calculate")
    assert (np.array(latest.costs) <= np.array(latest.limits) + 1e-9).all()
    assert run.router.calibration is latest


def test_validations_are_compared_at_equal_cost(finished: tuple[Path, Run, dict[str, Any]]) -> None:
    """The validation that was lucky to spend more has the higher score, but the lower one at the budget."""
    _, run, _ = finished
    router = run.router
    assert isinstance(router, LearnedRouter)
    assert router.calibration is not None
    (decision,) = router.decide(run.validation_tasks[:1], 1, 9, label="eval", explore=False)
    (rollout,) = asyncio.run(run.scheduler.roll_out([decision]))

    def validated(score: float, calls: list[int]) -> dict[str, float]:
        return {"score": score} | budget_metrics(
            router,
            [
                ScoredRollout(
                    replace(rollout, route="SEARCH-FAMILY", usage=replace(rollout.usage, calls={"search": count})),
                    EvaluateResult(score=score),
                    rollout.steps,
                )
                for count in calls
            ],
        )

    before = router.calibration
    router.calibration = replace(before, costs=(0.2,), slope=0.2)
    try:
        lucky, plain_one = validated(0.60, [1] * 30 + [0] * 70), validated(0.55, [1] * 20 + [0] * 80)
        wasteful = validated(0.99, [1] * 90 + [0] * 10)
    finally:
        router.calibration = before
    assert (lucky["budget/score"], plain_one["budget/score"]) == pytest.approx((0.50, 0.55))
    assert lucky["budget/overspend"] == plain_one["budget/overspend"] == 0  # 0.3 ± 0.046 may be chance
    assert wasteful["budget/overspend"] > 0
    keys = [checkpoint.ranking_key(metrics, "score") for metrics in (lucky, plain_one, wasteful)]
    assert sorted(keys) == [keys[1], keys[0], keys[2]]  # type: ignore[type-var]


def test_evaluating_calibration_tasks_is_warned_about(
    finished: tuple[Path, Run, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run, _ = finished
    aside = list(run.calibration.calibration)
    for source in (folder / "run", folder / "run/checkpoints/step-000002"):
        warn_about_calibration_tasks(source, [*aside[:5], *run.batches.tasks[:3]])
        assert "the router was calibrated on 5 of these 8 tasks" in capsys.readouterr().err
    warn_about_calibration_tasks(folder / "run", run.batches.tasks[:3])
    assert capsys.readouterr().err == ""
