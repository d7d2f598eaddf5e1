"""An estimator, a loss or a router of the user's that fails in mid-run: a checkpoint, a summary, and a way to go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.advantages import Grpo
from toolwise.errors import ToolwiseError
from toolwise.learner.losses import clipped_policy_loss

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]

PARTS = """
import os

import torch
from toolwise import CreditedBatch, PolicyLoss, Router
from toolwise.advantages import Grpo
from toolwise.learner.losses import clipped_policy_loss
from toolwise.routing.routers import DirectRouter

FAILS, CALL = "nothing", 1
calls = 0


def check(method):
    global calls
    calls += method == FAILS
    if method == FAILS and calls == CALL:
        raise ValueError("no such\\ncity")


class Estimator(Grpo):
    def __call__(self, rollouts):
        check("estimator")
        return super().__call__(rollouts)

    def learns_from_equal_scores(self, score):
        check("equal")
        return super().learns_from_equal_scores(score)


class Loss(PolicyLoss):
    metric_names = ("clip_frac",)

    def __init__(self, clip=0.2):
        self.clip = clip

    def __call__(self, logprobs, old_logprobs, advantages, sequences):
        check("loss")
        losses, clipped = clipped_policy_loss(
            logprobs, old_logprobs, advantages, clip_low=self.clip, clip_high=self.clip, dual_clip=3.0
        )
        return losses, {"clip_frac": clipped.float()}


class Mine(Router):
    def __init__(self, seed, weight=1.0):
        self.inner, self.weight, self.learned = DirectRouter(seed), weight, []

    def decide(self, tasks, n, step, *, label="step", explore=True):
        check("decide" if explore else "validation")
        return self.inner.decide(tasks, n, step, label=label, explore=explore)

    def learn(self, scored):
        self.learned.append(len(scored))
        check("learn")
        return {}

    def state_dict(self):
        return {"learned": self.learned}

    def load_state_dict(self, state):
        self.learned = state["learned"]
"""


def write_parts(file: Path, fails: str, call: int = 1, more: str = "") -> None:
    file.write_text(PARTS.replace('"nothing", 1', f'"{fails}", {call}') + more)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "engine/"))} for line in lines]


STOPS = [
    ("decide", 2, "router PATH:Mine: decide failed: ", 1),
    ("estimator", 1, "algorithm.adv_estimator: Estimator failed: ", 1),
    ("loss", 1, "actor.policy_loss: Loss failed: ", 1),
    ("learn", 1, "router PATH:Mine: learn failed: ", 2),
    ("validation", 1, "router PATH:Mine: decide failed: ", 2),
]
"""What fails, at which of its calls in that process, how the message begins, and the steps that are finished then."""


@pytest.mark.long
def test_it_ends_with_a_checkpoint_and_a_summary_and_the_mended_file_goes_on(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, tiny_run: Path
) -> None:
    """One run, in which one part fails after another: it is started once, and goes on whenever the file is mended."""
    file, run = tmp_path / "mine.py", tmp_path / "run"
    changes = {
        "deterministic": True,
        "algorithm": {"adv_estimator": "mine.py:Estimator"},
        "actor": {"policy_loss": "mine.py:Loss", "lr": 1e-4},
        "router": {"name": "mine.py:Mine"},
        "trainer": {"total_steps": 2, "save_every": 5},
    }
    config = make_config(tmp_path, changes)
    for fails, call, part, steps in STOPS:
        write_parts(file, fails, call)
        ended = cli("resume", run) if run.exists() else cli("train", config, "--out", run)
        assert ended.status == 2, fails
        [line] = ended.err.splitlines()
        assert f"{part.replace('PATH', str(file))}ValueError: no such city ({file}:18)" in line
        assert line.endswith(f"; fix it, then continue from step {steps}: toolwise resume {run}")
        summary = json.loads((run / "summary.json").read_bytes())
        assert (summary["steps"], summary["interrupted"]) == (steps, False), fails
        assert summary["stopped"] in line
        [finding] = [entry for entry in summary["diagnosis"] if entry["kind"] == "stopped"]
        assert finding["cure"] in line
        assert (run / "report.html").exists()
        assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == f"step-{steps:06d}"
    write_parts(file, "nothing")
    ended = cli("resume", run)
    assert ended.status == 0, ended.err
    # The second step has no metrics: `learn` failed in it.
    assert metrics_of(run) == [line for line in metrics_of(tiny_run) if line["step"] != 2 or "eval/score" in line]
    assert json.loads((run / "summary.json").read_bytes())["stopped"] is None


@pytest.mark.long
def test_a_metric_whose_name_is_taken_gets_another(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, tiny_run: Path
) -> None:
    more = (
        "\n\nclass Claims(Grpo):\n    def __call__(self, rollouts):\n"
        "        names = ('actor/loss', 'score/mean', 'eval/score', 'step', 'mine/own')\n"
        "        return CreditedBatch(super().__call__(rollouts).rollouts, dict.fromkeys(names, 7.0))\n"
        "\n\nclass Router2(Mine):\n    def learn(self, scored):\n"
        "        return {'actor/entropy': 8.0, 'mine/own': 9.0}\n"
    )
    write_parts(tmp_path / "mine.py", "nothing", more=more)
    parts = {"algorithm": {"adv_estimator": "mine.py:Claims"}, "router": {"name": "mine.py:Router2"}}
    ended = cli("train", make_config(tmp_path, parts | {"deterministic": True}), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    assert "the estimator reports a metric actor/loss, which the run has too: it is logged as estimator/" in ended.err
    lines = metrics_of(tmp_path / "run")
    renamed = {"estimator/actor/loss", "estimator/score/mean", "estimator/eval/score", "estimator/step"}
    renamed |= {"router/actor/entropy", "router/mine/own"}
    assert all(line.get(name) in (7.0, 8.0, 9.0) for line in lines if "actor/loss" in line for name in renamed)
    own = {*renamed, "mine/own"}
    assert [{k: v for k, v in line.items() if k not in own} for line in lines] == metrics_of(tiny_run)


@pytest.mark.long
def test_the_arguments_of_a_user_s_parts_may_change_on_the_way(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    write_parts(tmp_path / "mine.py", "nothing")
    parts = {
        "algorithm": {"adv_estimator": "mine.py:Estimator", "estimator_kwargs": {"norm_by_std": True}},
        "actor": {"policy_loss": "mine.py:Loss", "policy_loss_kwargs": {"clip": 0.2}},
        "router": {"name": "mine.py:Mine"},
        "trainer": {"total_steps": 1},
        "validation": {"before": False},
    }
    run = tmp_path / "run"
    assert cli("train", make_config(tmp_path, parts), "--out", run).status == 0
    changed = {
        "algorithm.estimator_kwargs.norm_by_std": "false",
        "actor.policy_loss_kwargs.clip": "0.3",
        "router.kwargs.weight": "2.0",
        "trainer.total_steps": "2",
    }
    ended = cli("resume", run, *(word for key, value in changed.items() for word in ("--set", f"{key}={value}")))
    assert ended.status == 0, ended.err
    recorded = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
    assert {line["key"]: (line["step"], json.dumps(line["new"])) for line in recorded} == {
        key: (1, value) for key, value in changed.items()
    }


class Unreadable(toolwise.AdvantageEstimator):
    """Fails where nobody expects it, in the second step."""

    steps = 0
    rewards = toolwise.RewardSettings()

    @property
    def uses_step_rewards(self) -> bool:
        return False

    def __call__(self, rollouts: Any) -> toolwise.CreditedBatch:
        type(self).steps += 1
        return Grpo()(rollouts)

    @property
    def min_group_size(self) -> int:
        if self.steps == 2:
            raise LookupError("lost")
        return 2


def test_any_other_error_ends_it_with_a_checkpoint_and_a_summary_too(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unreadable, "steps", 0)
    run = tmp_path / "run"
    with pytest.raises(LookupError, match="lost"):
        toolwise.train(
            make_config(tmp_path, {"trainer": {"total_steps": 4, "save_every": 9}}), out=run, estimator=Unreadable()
        )
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["steps"], summary["interrupted"]) == (2, False)
    assert summary["stopped"].startswith(f"LookupError: lost ({__file__}:")
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == "step-000002"


class Keeps(Grpo):
    def learns_from_equal_scores(self, score: float) -> bool:
        return True


class Midway(toolwise.PolicyLoss):
    """Fails in the second half of the second update."""

    calls = 0

    def __call__(self, logprobs: Any, old_logprobs: Any, advantages: Any, sequences: Any) -> Any:
        type(self).calls += 1
        if self.calls == 4:
            raise LookupError("lost")
        return clipped_policy_loss(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.2)[0], {}


def test_weights_of_half_an_update_are_not_saved(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Midway, "calls", 0)
    run = tmp_path / "run"
    changes = {
        "actor": {"mini_batches": 2},
        "trainer": {"total_steps": 3, "save_every": 1, "console": False},
        "validation": {"before": False},
        "reward": {"kwargs": {"api_key": "sk-abcdefghijklmnopqrstuvwxyz123456"}},
    }
    with pytest.raises(
        ToolwiseError, match=r"Midway failed: LookupError: lost .* continue from step 1: toolwise resume"
    ):
        toolwise.train(make_config(tmp_path, changes), out=run, estimator=Keeps(), loss=Midway())
    assert json.loads((run / "summary.json").read_bytes())["steps"] == 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    assert "reward.kwargs.api_key: looks like a secret" in caplog.text
