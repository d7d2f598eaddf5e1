"""The example that learns how hard to think: it is a configuration, its gate is the shipped one, and it trains."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch

from toolwise.config.schema import RunConfig, load_config
from toolwise.demo.rooms.demonstrations import task_rows, write_rows
from toolwise.training.run import assemble
from toolwise.training.trainer import Training

torch.set_num_threads(1)

EXAMPLE = Path(__file__).parents[2] / "examples" / "rooms_rlvcr.toml"


def few_steps(folder: Path, *more: str) -> RunConfig:
    """The example beside tasks of its own, with the model that ships in place of the taught one."""
    (folder / "rooms_rlvcr.toml").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    for split in ("train", "heldout"):
        write_rows(list(task_rows(range(4), split)), folder / "rooms" / f"{split}.jsonl")
    small = (
        "model.path=builtin:small",
        "data.batch_size=1",
        "data.val_limit=2",
        "rollout.n=2",
        "trainer.total_steps=1",
    )
    few = ("rollout.max_new_tokens=12", "multi_turn.max_turns=2", "trainer.console=false", "reward.sandbox.tier=off")
    return load_config(folder / "rooms_rlvcr.toml", (*small, *few, *more))


def test_the_example_is_gated_and_keeps_a_budget(tmp_path: Path) -> None:
    config = few_steps(tmp_path)
    rlvcr = config.algorithm.rlvcr
    assert (config.algorithm.adv_estimator, rlvcr.enable, rlvcr.gate) == ("rlvcr", True, "signed")
    assert rlvcr.budget.limit is not None
    assert config.data.train == tmp_path / "rooms" / "train.jsonl"


def test_the_example_trains_and_counts_levels(tmp_path: Path) -> None:
    run = assemble(few_steps(tmp_path, "algorithm.zero_std_groups=keep"))
    asyncio.run(Training(run, tmp_path / "run", resume=False).run_training())
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    [step] = [line for line in told if "thinking/lambda" in line]
    assert step["rollouts"] == 2
    assert step["thinking/tokens/budget"] == 12.0
    assert any("eval/thinking/format_valid" in line for line in told)
