"""The base configuration: a run with it rolls out, ends, and trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from toolwise.api import read_config, read_tasks
from toolwise.data.files import write_rows
from toolwise.demo.rooms.demonstrations import demonstrations, task_rows
from toolwise.demo.rooms.recipe import rooms_config
from toolwise.thinking.reply import parse_reply
from toolwise.training.loop import train_step
from toolwise.training.run import assemble
from toolwise.training.sft import train_sft

torch.set_num_threads(1)


def test_the_settings_are_a_configuration(tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        write_rows(list(task_rows(range(3), split)), tmp_path / f"{split}.jsonl")
    config = read_config(rooms_config("builtin:small", tmp_path, seed=3))
    assert config.seed == 3
    assert config.data.train == tmp_path / "train.jsonl"


def test_a_step_of_learning_from_walks_in_the_world(tmp_path: Path) -> None:
    settings = rooms_config("builtin:small")
    settings |= {"data": {"batch_size": 1}, "algorithm": {"zero_std_groups": "keep"}}
    settings["rollout"] |= {"n": 2, "max_new_tokens": 16}
    run = assemble(read_config(settings), tasks=read_tasks(list(task_rows([0], "train")), "train"))
    try:
        result = asyncio.run(train_step(run))
    finally:
        run.close()
    assert result.metrics["rollouts"] == 2
    assert result.metrics["score/mean"] == 0.0  # a model without this SFT data finds no way out
    for scored in result.scored:
        told = [step.step_info for step in scored.rollout.steps]
        assert {info.get("step_kind", "easy") for info in told} == {"easy"}  # a truncated reply gets no info
        assert {info["state_key"] for info in told} == {"house 0, place 0"}


@pytest.mark.long
def test_a_few_minutes_of_teaching_teach_the_format(tmp_path: Path) -> None:
    """`toolwise sft` from the model that ships, on levelled walks: most of what it then writes keeps to the format."""
    train_sft(
        "builtin:small",
        list(demonstrations(2000)),
        tmp_path / "taught",
        {"steps": 200, "lr": 1e-3, "batch_tokens": 4096, "row_tokens": 512},
    )
    settings = rooms_config(tmp_path / "taught")
    run = assemble(read_config(settings), tasks=read_tasks(list(task_rows(range(8), "train")), "train"))
    try:
        scored = asyncio.run(train_step(run)).scored
    finally:
        run.close()
    readings = [parse_reply(step.raw_policy_output or "") for s in scored for step in s.steps]
    assert sum(reading.valid for reading in readings) > 0.8 * len(readings)
    assert {reading.level for reading in readings} >= {1, 2, 3, 4}
