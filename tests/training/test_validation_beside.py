"""Whole asynchronous runs whose validations are slower than their steps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from async_cases import async_run
from safetensors.torch import load_file

from toolwise.training import checkpoint, trainer
from toolwise.training.evaluate import validate
from toolwise.training.run import Run
from toolwise.training.trainer import Training
from toolwise.types import ScoredRollout

pytestmark = pytest.mark.long
STEPS = 6


def build(**changes: Any) -> Run:
    settings = {"mode": "async", "max_staleness": 2, "total_steps": STEPS, "save_every": 100, "console": False}
    return async_run(
        2,
        held_out=2,
        trainer={**settings, **changes},
        validation={"every": 2, "before": False},
        algorithm={"zero_std_groups": "keep"},
    )


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_slow_validation_measures_its_step_while_the_learner_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: dict[int, torch.Tensor] = {}
    updates: dict[int, int] = {}
    run = build()

    async def slow(setup: Run, *, step: int) -> list[ScoredRollout]:
        """Ends when two more updates have happened, or none can."""
        weights = setup.policy.model.get_input_embeddings().weight
        measured[step] = weights.detach().clone()
        for _ in range(3000):
            if step == STEPS or run.progress.step >= step + 2 or step == 4:
                break
            await asyncio.sleep(0.01)
        scored = await validate(setup, step=step)
        updates[step] = run.learner.version - step
        assert setup.policy.version == step
        assert torch.equal(weights, measured[step])
        return scored

    monkeypatch.setattr(trainer, "validate", slow)
    asyncio.run(Training(run, tmp_path, resume=False).run_training())
    lines = lines_of(tmp_path)
    assert updates[2] >= 2
    assert [line["step"] for line in lines if "rollouts" in line] == [1, 2, 3, 4, 5, 6]
    scores = {line["step"]: line["eval/score"] for line in lines if "eval/score" in line}
    assert list(scores) == [2, 4, 6]
    assert max(line["staleness/max"] for line in lines if "rollouts" in line) <= 2.0
    order = [line["step"] for line in lines]
    assert order.index(3) < len(order) - 1 - order[::-1].index(2)  # step 3 was logged before the results of step 2

    best = checkpoint.best(tmp_path / "checkpoints", "score")
    assert best is not None
    assert best.step == max(scores, key=lambda step: (scores[step], -step))
    assert best.figures["score"] == pytest.approx(scores[best.step])
    [weights] = [
        tensor for name, tensor in load_file(best.path / "model" / "model.safetensors").items() if "embed" in name
    ]
    assert torch.equal(weights, measured[best.step])
    assert best.part("progress")["validating"] is False
    assert best.part("progress")["last_step"] == best.step


def test_a_validation_that_fails_ends_the_run_which_resumes_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(total_steps=4)

    async def broken(setup: Run, *, step: int) -> list[ScoredRollout]:
        await asyncio.sleep(0.05)
        raise ZeroDivisionError("no held-out rollouts")

    monkeypatch.setattr(trainer, "validate", broken)
    with pytest.raises(ZeroDivisionError, match="no held-out rollouts"):
        asyncio.run(Training(run, tmp_path, resume=False).run_training())
    saved = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.part("progress")["validating"] is True
    assert saved.part("progress")["last_step"] is None
    monkeypatch.setattr(trainer, "validate", validate)
    asyncio.run(Training(build(total_steps=4), tmp_path, resume=True).run_training())
    lines = lines_of(tmp_path)
    assert next(line["step"] for line in lines if "eval/score" in line) == saved.step
    assert [line["step"] for line in lines if "rollouts" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("kept", [{"keep_best": True}, {"keep_best": False, "save_every": 2}], ids=["best", "due"])
def test_a_run_that_dies_during_a_validation_resumes_with_it(
    kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(**kept)

    class DiedError(BaseException):
        """What is left is the checkpoint that was saved as the validation began."""

    async def dies(setup: Run, *, step: int) -> list[ScoredRollout]:
        for _ in range(3000):
            if (tmp_path / "checkpoints" / "step-000002" / "model").exists():
                break
            await asyncio.sleep(0.01)
        raise DiedError

    monkeypatch.setattr(trainer, "validate", dies)
    with pytest.raises(DiedError):
        asyncio.run(Training(run, tmp_path, resume=False).run_training())
    saved = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.step == 2
    assert saved.part("progress")["validating"] is True
    assert saved.figures == {}
    monkeypatch.setattr(trainer, "validate", validate)
    asyncio.run(Training(build(**kept), tmp_path, resume=True).run_training())
    assert [line["step"] for line in lines_of(tmp_path) if "eval/score" in line] == [2, 4, 6]


def test_a_step_that_fails_loses_no_validation_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(keep_best=True)
    update = run.learner.update

    def fails(*arguments: Any) -> Any:
        if run.progress.step == 3:
            raise ZeroDivisionError("the fourth update")
        return update(*arguments)

    async def slow(setup: Run, *, step: int) -> list[ScoredRollout]:
        await asyncio.sleep(1.0)
        return await validate(setup, step=step)

    monkeypatch.setattr(type(run.learner), "update", lambda self, *arguments: fails(*arguments))
    monkeypatch.setattr(trainer, "validate", slow)
    with pytest.raises(ZeroDivisionError, match="the fourth update"):
        asyncio.run(Training(run, tmp_path, resume=False).run_training())
    assert [line["step"] for line in lines_of(tmp_path) if "eval/score" in line] == [2]
    measured = checkpoint.load(tmp_path / "checkpoints" / "step-000002")
    assert "score" in measured.figures
    assert measured.part("progress")["validating"] is False
