"""Price lists and random budgets along the whole path: train, checkpoint, resume, evaluate, export, ask."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import toolwise
from toolwise.agent.loader import load_router
from toolwise.config.schema import RunConfig
from toolwise.data import load_tasks
from toolwise.demo.tasks import make_rows
from toolwise.errors import CheckpointError, ConfigError
from toolwise.routing.budget_bins import BINS_KEY
from toolwise.routing.head.head import load_head
from toolwise.training import checkpoint
from toolwise.training.records import read_records
from toolwise.types import Task

torch.set_num_threads(1)

PRICES = {"calls": {"calculator": 1.0, "search": 1.0}, "tokens": {"tokens": 1.0, "thinking_tokens": 0.5}}
RANDOM = {
    "prices": {"calls": {"*": 1.0}},
    "budgets": [{"limit": 0.5, "unit": "calls"}],
    "random_budgets": {"low": 0.1, "high": 0.9, "bins": 3},
    "budget_prompt": True,
    "max_cost": 1.0,
    "lr_schedule": "constant",  # a run that is extended then learns like one that was longer from the start
    "entropy_final": 0.3,
    "average_last": 0.0,
}


def settings(folder: Path, steps: int = 2, **router: Any) -> dict[str, Any]:
    data = folder / "tasks.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps(row) + "\n" for row in make_rows(256, seed=0, split="train")))
    return {
        "deterministic": True,
        "data": {"train": str(data), "batch_size": 2},
        "tools": ["calculator", "search"],
        "rollout": {"n": 3, "max_new_tokens": 24},
        "multi_turn": {"max_turns": 2},
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
        "trainer": {"total_steps": steps, "save_every": 1, "console": False},
        "validation": {"before": False},
        "router": {
            "enable": True,
            "train_actor": False,
            "lr": 0.05,
            "wording": "silent",
            "calibration_rollouts": 6,
            **router,
        },
    }


def train(folder: Path, steps: int = 2, *, resume: bool = False, **router: Any) -> Any:
    made = settings(folder, steps, **router)
    return toolwise.train(made, val=load_tasks(folder / "tasks.jsonl")[:6], out=folder / "run", resume=resume)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-budgets")
    train(folder, **RANDOM)
    return folder


def test_one_policy_serves_all_budgets_from_training_to_asking(finished: Path) -> None:
    summary = json.loads((finished / "run/summary.json").read_text())
    assert {"budget/calls/within", "budget/max_cost/within"} <= set(summary["after"])
    assert summary["after"]["budget/max_cost/within"] == 1.0
    routing = load_router(finished / "run")
    assert routing.bins is not None
    assert [c.limits for c in routing.bins.calibrations] == [(0.1,), (0.5,), (0.9,)]
    assert routing.trained == routing.bins.calibrations[1]
    agent = toolwise.load(finished / "run")
    for budget, told in ((None, "0.5"), (0.1, "0.1"), (0.7, "(0.5|0.9)")):  # 0.7 was never trained for
        answer = agent.ask("What is 12 * 34?", budget=budget)
        shown = answer.rollout.messages[0].content or ""
        assert re.search(rf"Budget: {told} calls on average, at most 1\.$", shown)
    questions = [Task(task_id=str(i), prompt=[{"role": "user", "content": f"{i}?"}]) for i in range(20)]
    assert {routing.told_budget(question, 0.7) for question in questions} == {0.5, 0.9}
    assert {routing.told_budget(question, 0.9) for question in questions} == {0.9}
    with pytest.raises(ConfigError, match=r"budget 0\.95 is outside 0\.1 to 0\.9"):
        agent.ask("What is 12 * 34?", budget=0.95)


def test_lines_about_the_budget_are_undone_in_stored_prompts(finished: Path) -> None:
    records = list(read_records(finished / "run/rollouts/step-000001.jsonl"))
    assert records
    for record in records:
        assert "Budget: " in str(record.messages[0])
        assert "Budget" not in str(record.original_messages[0])


def test_a_stored_head_with_other_budgets_is_refused(finished: Path) -> None:
    with pytest.raises(CheckpointError, match="trained with 3 random budgets, but"):
        load_router(finished / "run", overrides=["router.random_budgets.bins=4"])


@pytest.mark.long
def test_random_budgets_are_resumed_evaluated_and_exported(finished: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    train(whole, 3, **RANDOM)
    train(finished, 3, resume=True, **RANDOM)
    heads = [load_head(folder / "run/checkpoints/step-000003/model") for folder in (whole, finished)]
    assert heads[0][1][BINS_KEY] == heads[1][1][BINS_KEY]
    assert all(torch.equal(a, b) for a, b in zip(heads[0][0].parameters(), heads[1][0].parameters(), strict=True))
    last = checkpoint.latest(finished / "run/checkpoints")
    assert last is not None
    tasks, config = load_tasks(finished / "tasks.jsonl")[:6], RunConfig.model_validate(settings(finished, 3, **RANDOM))
    measured = toolwise.evaluate(last.path / "model", tasks, config=config)
    assert measured["budget/max_cost/within"] == 1.0


@pytest.mark.long
def test_a_price_list_along_the_whole_path(tmp_path: Path) -> None:
    budgets = [{"limit": 0.4, "unit": "calls"}, {"limit": 14.0, "unit": "tokens", "rate": 0.0001}]
    result = train(tmp_path, prices=PRICES, budgets=budgets)
    after = result.summary["after"]
    assert after["budget/tokens/delivered"] > 0
    train(tmp_path, 3, resume=True, prices=PRICES, budgets=budgets)
    routing = load_router(tmp_path / "run")
    assert routing.trained is not None
    assert routing.trained.units == ("calls", "tokens")
    answer = toolwise.load(tmp_path / "run").ask("What is 12 * 34?")
    assert answer.cost == sum(answer.calls.values())


def test_a_thinking_price_can_only_follow_a_unit_that_prices_thinking(tmp_path: Path) -> None:
    made = settings(tmp_path, prices={"calls": {"*": 1.0}}, budgets=[{"limit": 0.4, "unit": "calls"}])
    made["algorithm"] = {"rlvcr": {"enable": True, "budget": {"unit": "calls"}}}
    with pytest.raises(ConfigError, match=r"thinking costs nothing: set router\.prices\.calls\.thinking_tokens"):
        toolwise.train(made, val=load_tasks(tmp_path / "tasks.jsonl")[:2], out=tmp_path / "run")
    made["algorithm"]["rlvcr"]["budget"]["unit"] = "usd"
    with pytest.raises(ConfigError, match="but the router has no budget in it"):
        toolwise.train(made, val=load_tasks(tmp_path / "tasks.jsonl")[:2], out=tmp_path / "run")
