"""A user's estimator and policy loss: from a file by the command line, as objects by the API, and bad ones."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toolwise
from toolwise.advantages import Grpo, credit_rollout, total_rewards
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.losses import PolicyLossError, PpoClip
from toolwise.training.components import load_estimator, load_loss
from toolwise.training.run import check_learnable
from toolwise.types import AnnotatedRollout

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]
HERE = Path(__file__).resolve()

SAME = """
from toolwise import CreditedBatch, PolicyLoss
from toolwise.advantages import Grpo
from toolwise.learner.losses import clipped_policy_loss


class SameAsGrpo(Grpo):
    def __call__(self, rollouts):
        batch = super().__call__(rollouts)
        return CreditedBatch(batch.rollouts, {"mine/rollouts": len(rollouts)})


class SameAsPpo(PolicyLoss):
    metric_names = ("clip_frac", "sequences")

    def __init__(self, clip=0.2):
        self.clip = clip

    def __call__(self, logprobs, old_logprobs, advantages, sequences):
        losses, clipped = clipped_policy_loss(
            logprobs, old_logprobs, advantages, clip_low=self.clip, clip_high=self.clip, dual_clip=3.0
        )
        return losses, {"clip_frac": clipped.float(), "sequences": sequences.float()}
"""


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """All metrics except times, and what only the parts above report."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = ("mine/", "actor/sequences")
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "engine/", *own))} for line in lines]


@pytest.mark.long
def test_both_come_from_a_file_and_a_resumed_run_gives_the_same_numbers(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, tiny_run: Path
) -> None:
    (tmp_path / "mine.py").write_text(SAME)
    changes = {
        "algorithm": {"adv_estimator": "mine.py:SameAsGrpo", "estimator_kwargs": {"norm_by_std": True}},
        "actor": {"policy_loss": "mine.py:SameAsPpo", "policy_loss_kwargs": {"clip": 0.2}},
    }
    (tmp_path / "stop.py").write_text(
        "import toolwise\n\n\nclass Once(toolwise.Callback):\n    def on_step(self, event):\n"
        "        return toolwise.Stop('enough') if event.step == 1 else None\n"
    )
    trainer = {"trainer": {"total_steps": 2, "callbacks": ["stop.py:Once"]}}
    run = tmp_path / "run"
    ended = cli("train", make_config(tmp_path, changes | trainer | {"deterministic": True}), "--out", run)
    assert ended.status == 0, ended.err
    ended = cli("resume", run)
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "mine/rollouts" in line] == [1, 2]
    assert any(line.get("actor/sequences", 0.0) > 0.0 for line in lines)
    found = [{k: v for k, v in line.items() if k != "faults/callback"} for line in metrics_of(run)]
    assert found == metrics_of(tiny_run)  # a loss of one's own goes through another path


@dataclass(frozen=True)
class Centered(toolwise.AdvantageEstimator):
    """The reward minus the mean of the batch."""

    scale: float = 1.0
    rewards = toolwise.RewardSettings()
    min_group_size = 1

    def learns_from_equal_scores(self, score: float) -> bool:
        return True

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> toolwise.CreditedBatch:
        totals = total_rewards(rollouts, self.rewards)
        advantages = (self.scale * (totals - totals.mean())).tolist()
        credited = [credit_rollout(rollout, a) for rollout, a in zip(rollouts, advantages, strict=True)]
        return toolwise.CreditedBatch(credited, {"centered/mean": float(totals.mean())})


@dataclass(frozen=True)
class Unclipped(toolwise.PolicyLoss):
    """The policy gradient with an importance weight."""

    bound: float = 5.0
    metric_names = ("ratio",)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (logprobs - old_logprobs).clamp(max=self.bound).exp()
        return -ratio * advantages, {"ratio": ratio}


class Nameless(Centered):
    """Not created by its fields: another process cannot create it again."""

    def __init__(self, file: Any) -> None:
        super().__init__(2.0)
        object.__setattr__(self, "file", file)


ROWS = [{"prompt": f"What is {a} + {b}?", "ground_truth": str(a + b)} for a, b in ((12, 45), (67, 8), (31, 27))]
SMALL: dict[str, Any] = {
    "model": {"device": "cpu"},
    "data": {"batch_size": 2},
    "rollout": {"n": 2, "max_new_tokens": 8, "temperature": 3.0},
    "multi_turn": {"max_turns": 1},
    "reward": {"sandbox": {"tier": "off"}},
    "algorithm": {"kl": "reward", "kl_coef": 0.01},
    "validation": {"before": False},
    "trainer": {"total_steps": 1, "save_every": 1, "console": False},
}


def varied(messages: Any, ground_truth: Any) -> float:
    return float(sum(map(ord, messages[-1]["content"])) % 101)


def test_both_are_given_as_objects_and_recorded_for_the_command_line(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "run"
    result = toolwise.train(
        SMALL, tasks=ROWS, val=ROWS[:1], reward=varied, out=out, estimator=Centered(scale=2.0), loss=Unclipped
    )
    recorded = tomllib.loads((out / "config.toml").read_text())
    assert recorded["algorithm"]["adv_estimator"] == f"{HERE}:Centered"
    assert recorded["algorithm"]["estimator_kwargs"] == {"scale": 2.0}
    assert recorded["actor"]["policy_loss"] == f"{HERE}:Unclipped"
    ended = cli("resume", out, "--set", "trainer.total_steps=2")
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "centered/mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["actor/ratio"] > 0.0 and line["actor/update_norm"] > 0.0 for line in steps)
    assert all("kl/cost" in line and "actor/clip_frac" not in line for line in steps)
    assert result.summary["steps"] == 1


def test_an_object_that_no_file_can_name_must_be_given_again(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "run"
    toolwise.train(SMALL, tasks=ROWS, reward=varied, out=out, estimator=Nameless(object()))
    ended = cli("resume", out, "--set", "trainer.total_steps=2")
    assert ended.status == 2
    assert "algorithm.adv_estimator: this run was started from Python with the estimator" in ended.err
    assert ended.err.count("\n") == 1
    resumed = toolwise.resume(out, estimator=Nameless(object()), overrides=["trainer.total_steps=2"])
    assert resumed.summary["steps"] == 2


def config(algorithm: dict[str, Any] | None = None, actor: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    return RunConfig.model_validate({"algorithm": algorithm or {}, "actor": actor or {}, **more})


def test_built_in_ones_are_named() -> None:
    assert load_estimator(config({"norm_adv_by_std": False})) == Grpo(norm_by_std=False)
    assert load_loss(config()) is None
    assert load_estimator(config(), Centered) == Centered()
    assert load_estimator(config({"estimator_kwargs": {"scale": 3.0}}), Centered) == Centered(3.0)
    assert vars(load_loss(config(), f"{HERE}:Unclipped")) == {"bound": 5.0}
    assert load_loss(config(), PpoClip(0.1, 0.3)) == PpoClip(0.1, 0.3)


def test_its_group_size_counts() -> None:
    check_learnable(config(rollout={"n": 1}), Centered())
    with pytest.raises(ConfigError, match=r"rollout\.n is 1"):
        check_learnable(config(rollout={"n": 1}))


class Silent(toolwise.AdvantageEstimator):
    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> toolwise.CreditedBatch:
        return Grpo()(rollouts)


class Incomplete:
    needs: frozenset[str] = frozenset()


class Greedy(Silent):
    needs = frozenset({"rewards"})  # type: ignore[assignment]


def fails() -> Any:
    raise OSError("no\nsuch file")


class Unreadable(Silent):
    @property
    def min_group_size(self) -> int:
        raise KeyError("none")


OBJECT = Centered()
MINE = f"{HERE}:Centered"
KL = 'algorithm.kl = "reward" would have no effect: algorithm.adv_estimator: '
BAD: list[tuple[dict[str, Any], str]] = [
    ({"adv_estimator": "gipgo"}, "algorithm.adv_estimator is 'gipgo'; choose one of grpo, rloo, "),
    ({"adv_estimator": "no_such_module:X"}, "algorithm.adv_estimator: cannot import 'no_such_module'"),
    (
        {"adv_estimator": f"{HERE}:Centred"},
        f"algorithm.adv_estimator: {HERE} has no 'Centred'; did you mean 'Centered'?",
    ),
    (
        {"adv_estimator": MINE, "estimator_kwargs": {"scala": 2}},
        "Centered has no option 'scala'; did you mean 'scale'?",
    ),
    (
        {"adv_estimator": f"{HERE}:OBJECT", "estimator_kwargs": {"scale": 2}},
        "is an object, not a class; set scale where",
    ),
    ({"adv_estimator": "grpo", "estimator_kwargs": {"scale": 2}}, "algorithm.estimator_kwargs are for an estimator of"),
    ({"adv_estimator": f"{HERE}:fails"}, f"fails could not be created: OSError: no such file ({HERE}:"),
    ({"adv_estimator": f"{HERE}:Unreadable"}, f"Unreadable failed: KeyError: 'none' ({HERE}:"),
    ({"adv_estimator": f"{HERE}:Incomplete"}, "Incomplete has no rewards, uses_step_rewards, min_group_size, per"),
    ({"adv_estimator": f"{HERE}:Greedy"}, "Greedy: needs is frozenset({'rewards'}); use a frozenset of old_logprobs"),
    ({"adv_estimator": f"{HERE}:Silent", "kl": "reward"}, f"{KL}{HERE}:Silent declares no `rewards`; compute rewards"),
    ({"adv_estimator": MINE, "terminal_score": "add"}, "algorithm.terminal_score applies to the built-in estimators"),
    (
        {"adv_estimator": f"{HERE}:Silent", "rlvcr": {"enable": True, "subtract_thinking_cost": True}},
        "algorithm.rlvcr.subtract_thinking_cost would have no effect",
    ),
]


@pytest.mark.parametrize(("algorithm", "told"), BAD)
def test_a_bad_estimator_is_an_error_in_one_line(algorithm: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_estimator(config(algorithm))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


class Odd(Unclipped):
    metric_names = "ratio"  # type: ignore[assignment]


class Hiding(Unclipped):
    metric_names = ("kl",)


BAD_LOSSES: list[tuple[dict[str, Any], str]] = [
    ({"policy_loss": "pp"}, "or package.module:Name; did you mean 'ppo'?"),
    ({"policy_loss_kwargs": {"bound": 2.0}}, "actor.policy_loss_kwargs are for a loss of your own"),
    ({"policy_loss": f"{HERE}:Odd"}, "metric_names is 'ratio'; use a tuple of names"),
    ({"policy_loss": f"{HERE}:Hiding"}, "every loss has a metric kl; rename yours"),
    ({"policy_loss": f"{HERE}:Incomplete"}, "Incomplete has no metric_names, __call__; subclass toolwise.PolicyLoss"),
    (
        {"policy_loss": f"{HERE}:Unclipped", "policy_loss_kwargs": {"bond": 1}},
        "no option 'bond'; did you mean 'bound'?",
    ),
]


@pytest.mark.parametrize(("actor", "told"), BAD_LOSSES)
def test_a_bad_loss_is_an_error_in_one_line(actor: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_loss(config(actor=actor))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


class NotANumber(Unclipped):
    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = super().__call__(logprobs, old_logprobs, advantages, sequences)
        return losses * torch.nan, metrics


class Unrelated(Unclipped):
    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = super().__call__(logprobs, old_logprobs, advantages, sequences)
        return 0 * losses, metrics


def test_a_loss_without_a_gradient_ends_the_run_at_its_first_update(tmp_path: Path) -> None:
    with pytest.raises(PolicyLossError, match="Unrelated: the gradient of its losses by logprobs is 0 for every"):
        toolwise.train(SMALL, tasks=ROWS, reward=varied, out=tmp_path / "run", estimator=Centered, loss=Unrelated)
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["steps"] == 0


def test_a_run_whose_loss_is_not_a_number_ends_with_one_line(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    changes = {
        "algorithm": {"adv_estimator": MINE},
        "actor": {"policy_loss": f"{HERE}:NotANumber"},
        "validation": {"before": False},
    }
    ended = cli("train", make_config(tmp_path, changes), "--out", tmp_path / "run")
    assert ended.status == 2
    [line] = [line for line in ended.err.splitlines() if "NotANumber" in line]
    assert "actor.policy_loss: NotANumber returned nan for" in line
    assert "Traceback" not in ended.err
