"""From a real update: the advantages that the loss saw are those in the files, and so are their parts times factors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reciting import THINKING_TASKS, recite

from toolwise.config.schema import RunConfig
from toolwise.data.rows import tasks_from_rows
from toolwise.demo.tasks import make_rows
from toolwise.learner import actor
from toolwise.learner.batch import Batch
from toolwise.learner.token_statistics import TokenStatistics
from toolwise.training.run import assemble
from toolwise.training.token_records import StepTokens, read_tokens
from toolwise.training.trainer import Training
from toolwise.view.rollout_page import rollout_page
from toolwise.view.rollout_store import RunStore

torch.set_num_threads(1)
pytestmark = pytest.mark.long

STEPS = 3
KL = {"kl": "reward", "kl_coef": 0.5, "zero_std_groups": "keep"}
PRICED = {"subtract_thinking_cost": True, "budget": {"price": 0.1}, "share": 0.0}
LEVELS = {"share": 1.0, "max_added_tokens": 0.0, "max_thought_tokens": 12}
ESTIMATORS = ("grpo", "rloo", "gigpo", "hgpo", "gae", "reinforce_plus_plus", "hdpo", "pareto")


def thinking(estimator: str, **rlvcr: Any) -> dict[str, Any]:
    return {"adv_estimator": estimator, "rlvcr": {"enable": True, **rlvcr}}


PRICED_RUNS = {f"{name}-priced": thinking(name, **PRICED) for name in ESTIMATORS}
THINKING_RUNS = PRICED_RUNS | {
    "rlvcr": thinking("rlvcr", **LEVELS),
    "rlvcr-signed": thinking("rlvcr", **LEVELS, gate="signed", mode="mean_std_norm"),
    "rlvcr-success": thinking("rlvcr", **LEVELS, gate="success", success_score=1.0),
    "rlvcr-gigpo": thinking("rlvcr", **LEVELS, base="gigpo", gate="signed"),
    "rlvcr-reweight": thinking("rlvcr", **LEVELS, combine="reweight"),
    "rlvcr-priced": thinking("rlvcr", **LEVELS | {"subtract_thinking_cost": True, "budget": {"price": 0.1}}),
}
TOOL_RUNS: dict[str, dict[str, Any]] = {name: {"adv_estimator": name} for name in ESTIMATORS} | {
    "dr_grpo": {"adv_estimator": "grpo", "norm_adv_by_std": False},
    "gigpo-additive": {"adv_estimator": "gigpo", "combine": "additive"},
    "gae-turn": {"adv_estimator": "gae", "gae_per": "turn"},
}


def by_place(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[float]:
    return [float(i % 2) + 0.25 * (i % 3) for i in range(len(rollouts_messages))]


def settings(algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"device": "cpu"},
            "data": {"batch_size": 2},
            "rollout": {"n": 4, "max_new_tokens": 24},
            "reward": {"sandbox": {"tier": "off"}},
            "validation": {"before": False},
            "actor": {"lr": 2e-3, "mini_batches": 2},  # far enough from the reference for a KL
            "algorithm": {**KL, **algorithm},
            "trainer": {"total_steps": STEPS, "console": False, "save_every": 100},
            **sections,
        }
    )


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of tokens from which the actor's losses took their advantages, one per step."""
    seen: list[Batch] = []

    class Watched(TokenStatistics):
        def __init__(self, batch: Batch) -> None:
            seen.append(batch)
            super().__init__(batch)

    monkeypatch.setattr(actor, "TokenStatistics", Watched)
    return seen


def train(config: RunConfig, out: Path, *, tasks: Any = None, recited: bool = False) -> Path:
    run = assemble(
        config,
        tasks=tasks or tasks_from_rows(out, make_rows(8, seed=0, split="train")),
        validation_tasks=[],
        reward=by_place,
    )
    if recited:
        recite(run)
    asyncio.run(Training(run, out, resume=False).run_training())
    return out


def used_by(batch: Batch) -> dict[str, Any]:
    """Rollout -> what its tokens weighed in the loss."""
    rollouts, advantages = batch.rollout.numpy(), batch.advantages.numpy()
    return {name: advantages[rollouts == index] for index, name in enumerate(batch.rollout_ids)}


def product_of_parts(row: StepTokens) -> Any:
    total = sum(row.parts.values(), np.zeros(len(row.token_ids)))
    for factor in row.factors.values():
        total = total * factor
    return total


def check_files(out: Path, batches: list[Batch]) -> dict[str, float]:
    """Every stored advantage is the one that the loss saw, and that of its parts; the largest of each part."""
    largest: dict[str, float] = {}
    compared = 0
    for number, batch in enumerate(batches, start=1):
        used, stored = used_by(batch), dict[str, list[StepTokens]]()
        for row in read_tokens(out / "rollouts" / f"step-{number:06d}.tokens.parquet", prompts=False):
            if row.advantages is not None:
                stored.setdefault(row.rollout_id, []).append(row)
        assert {name for name in used if "/level-" not in name} == set(stored)  # not the alternatives of reweighting
        for name, rows in stored.items():
            advantages = np.concatenate([row.advantages for row in rows if row.advantages is not None])
            np.testing.assert_array_equal(advantages, used[name])
            parts = np.concatenate([product_of_parts(row) for row in rows])
            assert np.all(np.abs(parts - used[name]) <= 1e-6 * np.maximum(1.0, np.abs(used[name]))), name
            compared += len(advantages)
            for part, values in ((key, values) for row in rows for key, values in row.parts.items()):
                largest[part] = max(largest.get(part, 0.0), float(np.abs(values).max(initial=0.0)))
            for factor, values in ((key, values) for row in rows for key, values in row.factors.items()):
                largest[factor] = max(largest.get(factor, 0.0), float(np.abs(values - 1.0).max(initial=0.0)))
    assert compared > 100
    return largest


@pytest.mark.parametrize("name", TOOL_RUNS)
def test_parts_of_a_run_with_tools_add_up_to_what_the_loss_used(
    name: str, tmp_path: Path, batches: list[Batch]
) -> None:
    config = settings(TOOL_RUNS[name], tools=["calculator", "search"], multi_turn={"max_turns": 3})
    largest = check_files(train(config, tmp_path / "run"), batches)
    assert len(batches) == STEPS
    assert largest["trajectory"] > 0.01
    assert ("kl" in largest and largest["kl"] > 1e-4) or name == "pareto", largest
    assert ("step" in largest) == (name.startswith(("gigpo", "hgpo")))


@pytest.mark.parametrize("name", THINKING_RUNS)
def test_parts_of_a_run_that_thinks_add_up_to_what_the_loss_used(
    name: str, tmp_path: Path, batches: list[Batch]
) -> None:
    own = {"rollout": {"n": 4, "max_new_tokens": 24, "tool_parser": "none"}, "multi_turn": {"enable": False}}
    out = train(settings(THINKING_RUNS[name], **own), tmp_path / "run", tasks=THINKING_TASKS, recited=True)
    largest = check_files(out, batches)
    if name.endswith("priced") and name != "pareto-priced":
        assert largest["price"] > 0.01, largest
    if name == "rlvcr-reweight":
        assert largest["reweighting"] > 0.01, largest
    elif name.startswith("rlvcr"):
        assert largest["thinking"] > 0.01, largest


def test_an_asynchronous_run_stores_what_its_loss_used(tmp_path: Path, batches: list[Batch]) -> None:
    more = {
        "total_steps": STEPS,
        "console": False,
        "save_every": 100,
        "mode": "async",
        "max_staleness": 1,
        "several_stale_updates": True,
    }
    config = settings({"adv_estimator": "gigpo"}, tools=["calculator", "search"], trainer=more)
    check_files(train(config, tmp_path / "run"), batches)


def test_the_page_shows_the_numbers_of_the_update(tmp_path: Path, batches: list[Batch]) -> None:
    """The page of a rollout, its line in the file and the loss agree."""
    config = settings({"adv_estimator": "gigpo"}, tools=["calculator", "search"])
    store = RunStore(train(config, tmp_path / "run"))
    used = used_by(batches[0])
    for row in store.of_file("step-000001").to_pylist():
        page = json.loads(json.dumps(rollout_page(store, "step-000001", row["rollout_id"])))
        if not row["trained_on"]:
            continue
        shown = np.concatenate([step["advantages"] for step in page["tokens"]])
        np.testing.assert_array_equal(shown.astype(np.float32), used[row["rollout_id"]])
        means = [float(np.mean(step["advantages"])) for step in page["tokens"]]
        assert [step["advantage"] for step in page["steps"]] == pytest.approx(means, abs=1e-6)
        assert row["advantage"] == pytest.approx(np.mean(means), abs=1e-6)
