"""Evaluating, asking and rolling out build nothing that only training needs, whatever the configuration sets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import toolwise
from toolwise.config.schema import load_config
from toolwise.data import load_tasks
from toolwise.training.run import assemble

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "frozen_run.tar.gz"
TRAINING = {
    "toolwise.learner.optimizer.Optimizer": "__init__",
    "toolwise.learner.critic.Critic": "__init__",
    "toolwise.learner.actor.Actor": "__init__",
    "toolwise.learner.lora.Adapters": "__init__",
    "toolwise.learner.actor": "build_reference",
    "toolwise.routing.head.learner.RouterLearner": "__init__",
    "toolwise.data.batches.Batches": "__init__",
    "toolwise.rollout.queue.RolloutQueue": "__init__",
}
SETTINGS = {
    "grpo": [],
    "gae": ["algorithm.adv_estimator=gae"],
    "kl": ["algorithm.kl=loss"],
    "kl reward": ["algorithm.kl=reward"],
    "lora": ["actor.lora.rank=4"],
    "no router": ["router.enable=false"],
    "trained trunk": ["router.backbone=full", "router.optimizer=own"],
    "labels": ["router.label_coef=0.5", "router.warm_start_epochs=2"],
    "stratified": ["router.routes=stratified", "rollout.n=2"],
    "large batch": ["data.batch_size=1000"],
    "all": ["algorithm.adv_estimator=gae", "algorithm.kl=loss", "actor.lora.rank=4", "data.batch_size=1000"],
}
Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a router over a model of 38,000 weights."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("frozen")
    shutil.unpack_archive(ARCHIVE, folder)
    config = folder / "run" / "config.toml"
    text = config.read_text("utf-8").replace("/frozen", str(folder))
    assert text.count('tier = "basic"') == 1
    config.write_text(text.replace('tier = "basic"', 'tier = "off"'), encoding="utf-8")  # rewards are not the subject
    return folder


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("built something that only training needs")

    for owner, name in TRAINING.items():
        monkeypatch.setattr(f"{owner}.{name}", refuse)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", refuse)


def test_the_guard_catches_a_training_run(frozen: Path, no_training: None) -> None:
    with pytest.raises(AssertionError, match="only training needs"):
        assemble(load_config(frozen / "run" / "config.toml"))


@pytest.mark.parametrize(
    "changes",
    [pytest.param(s, id=n, marks=[] if n == "all" else pytest.mark.long) for n, s in SETTINGS.items()],
)
def test_eval_of_a_run_builds_nothing_for_training(
    frozen: Path, changes: list[str], cli: Cli, no_training: None
) -> None:
    arguments = [argument for change in changes for argument in ("--set", change)]
    ended = cli("eval", frozen / "run", "--json", *arguments)
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["n"] > 0


@pytest.mark.parametrize("changes", [SETTINGS["all"], SETTINGS["labels"]], ids=["all", "labels"])
def test_evaluate_in_python_builds_nothing_for_training(frozen: Path, changes: list[str], no_training: None) -> None:
    def length(messages: Any, ground_truth: Any) -> float:
        return float(len(messages[-1].content or ""))

    tasks = load_tasks(frozen / "heldout.jsonl")[:2]
    config = load_config(frozen / "run" / "config.toml", ["reward.parts=[]", "reward.sandbox.tier=off"])
    model = frozen / "run" / "checkpoints" / "step-000002" / "model"
    metrics = toolwise.evaluate(model, tasks, config=config, reward=length, overrides=changes)
    assert metrics["n"] == 2


def test_settings_of_training_do_not_change_the_metrics(frozen: Path, cli: Cli) -> None:
    changes = [argument for change in SETTINGS["all"] for argument in ("--set", change)]
    assert cli("eval", frozen / "run", "--json", *changes).out == cli("eval", frozen / "run", "--json").out


def test_an_agent_and_rollouts_build_nothing_for_training(
    frozen: Path, tmp_path: Path, cli: Cli, no_training: None
) -> None:
    for ended in (
        cli("run", frozen / "run", "How many mills does Alder have?", "--json"),
        cli("rollout", frozen / "run", "-n", 2, "--out", tmp_path / "rollouts", "--set", "algorithm.kl=loss"),
    ):
        assert ended.status == 0, ended.err


def test_a_frontier_builds_nothing_for_training(frozen: Path, tmp_path: Path, cli: Cli, no_training: None) -> None:
    rows = (frozen / "heldout.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(rows[:4]), encoding="utf-8")
    options = ("--budgets", "0,1", "--draws", 2, "--no-store", "--out", tmp_path / "frontier", "--json")
    ended = cli("eval", frozen / "run", "--data", tmp_path / "few.jsonl", *options)
    assert ended.status == 0, ended.err


def test_a_held_out_tool_that_is_missing_is_reported(frozen: Path, cli: Cli) -> None:
    ended = cli("eval", frozen / "run", "--set", 'multi_turn.held_out_tools=["nope"]')
    assert ended.status == 2
    assert "multi_turn.held_out_tools names 'nope'" in ended.err
