"""What summary.json says of a run: `after` is the validation of the last step only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import write_rows
from toolwise.training.run import Run, assemble
from toolwise.training.run_summary import summarize_run
from toolwise.types.findings import Finding


@pytest.fixture
def run(tmp_path: Path) -> Run:
    settings = {
        "name": "mine",
        "seed": 3,
        "model": {"path": "builtin:small"},
        "data": {"train": str(write_rows(tmp_path / "train.jsonl", 8, seed=0, split="train")), "batch_size": 4},
        "tools": ["calculator", "search"],
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
        "trainer": {"total_steps": 5},
    }
    return assemble(RunConfig.model_validate(settings))


def test_it_names_the_run_and_what_was_found(run: Run, tmp_path: Path) -> None:
    summary = summarize_run(run, tmp_path, [Finding("constant_reward", "warning", "cause", cure="cure")])
    assert (summary["name"], summary["seed"], summary["steps"], summary["total_steps"]) == ("mine", 3, 0, 5)
    assert [finding["kind"] for finding in summary["diagnosis"]] == ["constant_reward"]
    assert summary["tool_prompt"] == "tools are shown by the chat template"
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.parametrize(("step", "after"), [(4, {"score": 0.5}), (5, None)])
def test_a_validation_of_an_earlier_step_is_not_that_of_the_end(
    run: Run, tmp_path: Path, step: int, after: dict[str, float] | None
) -> None:
    run.progress.step, run.progress.last, run.progress.last_step = step, {"score": 0.5}, 4
    summary = summarize_run(run, tmp_path, [])
    assert summary["after"] == after
    assert summary["last_validation"] == {"step": 4, "score": 0.5}
