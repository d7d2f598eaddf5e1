"""The losses and their gradients against verl's and TRL's on random inputs, run in a separate environment."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from toolwise.advantages import compute_grpo_outcome_advantage
from toolwise.learner.kl import k2, k3
from toolwise.learner.loss_aggregation import Aggregation, token_weights
from toolwise.learner.losses import clipped_policy_loss, clipped_value_loss

PEERS = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
LOW, HIGH, DUAL, VALUE_CLIP, ROWS, LENGTH, GROUP = 0.2, 0.28, 3.0, 0.2, 48, 24, 4
MODES: dict[Aggregation, str] = {
    "token": "token-mean",
    "rollout": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
LOSS_TYPES: dict[Aggregation, str] = {"token": "dapo", "rollout": "grpo", "constant": "dr_grpo"}
"""What TRL calls the same."""

pytestmark = pytest.mark.skipif(not PEERS.exists(), reason="the peers' environment is missing: make bench-env")

VERL = """
import sys
import numpy as np, torch
from verl.trainer.ppo import core_algos as verl

given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1], allow_pickle=False).items()}
mask, found = given["mask"], {}

def keep(name, loss, over):
    loss.backward()
    found[name], found[name + "_gradient"] = loss.detach().numpy(), over.grad.numpy()

index = np.array([str(i) for i in given["index"].tolist()], dtype=object)
grouped, _ = verl.compute_grpo_outcome_advantage(given["outcome"], mask, index)
for mode in sys.argv[3:]:
    now = given["now"].clone().requires_grad_()
    loss = verl.compute_policy_loss(
        given["old"], now, grouped, mask,
        cliprange=0.2, cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=3.0, loss_agg_mode=mode,
    )[0]
    keep("grpo-" + mode, loss, now)
    now = given["now"].clone().requires_grad_()
    loss, clipped, _, far = verl.compute_policy_loss(
        given["old"], now, given["advantages"], mask,
        cliprange=0.2, cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=3.0, loss_agg_mode=mode,
    )
    keep(mode, loss, now)
    found["clipped"], found["far"] = clipped.numpy(), far.numpy()
values = given["values"].clone().requires_grad_()
loss, clipped = verl.compute_value_loss(values, given["returns"], given["old_values"], mask, 0.2)
keep("value", loss, values)
found["value_clipped"] = clipped.numpy()
for name in ("k1", "k2", "k3"):
    found[name] = verl.kl_penalty(given["now"], given["reference"], name).numpy()
np.savez(sys.argv[2], **found)
"""

TRL = """
import sys
from collections import defaultdict
from types import SimpleNamespace
import numpy as np, torch
from trl import GRPOTrainer

# Its loss is a method, so it gets what it reads of a trainer; the log-probs are given and not a model's.
given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1], allow_pickle=False).items()}
mask, found = given["mask"], {}
inputs = {
    "prompt_ids": mask[:, :1].long(), "prompt_mask": mask[:, :1], "completion_ids": mask.long(),
    "completion_mask": mask, "advantages": given["advantages"], "old_per_token_logps": given["old"],
    "num_items_in_batch": mask.sum(),
}
for kind in sys.argv[3:]:
    now = given["now"].clone().requires_grad_()
    trainer = SimpleNamespace(
        args=SimpleNamespace(delta=3.0, steps_per_generation=1), epsilon_low=0.2, epsilon_high=0.28, beta=0.0,
        loss_type=kind, max_completion_length=mask.shape[1], importance_sampling_level="token",
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, use_vllm=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    found[kind], found[kind + "_gradient"] = loss.detach().numpy(), now.grad.numpy()
np.savez(sys.argv[2], **found)
"""


@pytest.fixture(scope="module")
def given() -> dict[str, Tensor]:
    rng = np.random.default_rng(3)
    shape = (ROWS, LENGTH)
    # Replies of any length with a tool's tokens in their midst; ratios far on both sides of every clip.
    mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (ROWS, 1))) & (rng.random(shape) < 0.8)
    mask[:, 0] = True
    old = -rng.exponential(size=shape)
    values = rng.normal(size=shape)
    outcome = np.zeros(shape)
    outcome[:, 0] = rng.normal(size=ROWS)
    arrays = {
        "mask": mask.astype(np.float64),
        "old": old,
        "now": old + 0.8 * rng.normal(size=shape),
        "reference": old + 0.5 * rng.normal(size=shape),
        "advantages": rng.normal(size=shape),
        "outcome": outcome,
        "index": rng.permutation(np.arange(ROWS) // GROUP),
        "values": values,
        "old_values": values + 0.4 * rng.normal(size=shape),
        "returns": rng.normal(size=shape),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def peer(script: str, folder: Path, given: dict[str, Tensor], names: Iterable[str]) -> Any:
    file, taken = folder / "given.npz", folder / "taken.npz"
    np.savez(file, **{name: tensor.numpy() for name, tensor in given.items()})
    command = [str(PEERS), "-c", script, str(file), str(taken), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return np.load(taken)


@pytest.fixture(scope="module")
def verl(given: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return peer(VERL, tmp_path_factory.mktemp("verl"), given, MODES.values())


@pytest.fixture(scope="module")
def trl(given: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return peer(TRL, tmp_path_factory.mktemp("trl"), given, LOSS_TYPES.values())


def sampled(given: dict[str, Tensor], name: str) -> Tensor:
    return given[name][given["mask"] > 0]


def assert_same(
    losses: Tensor, weights: Tensor, over: Tensor, given: dict[str, Tensor], theirs: Any, name: str
) -> None:
    loss = (losses * weights).sum()
    loss.backward()
    assert over.grad is not None
    np.testing.assert_allclose(loss.item(), theirs[name], rtol=1e-6)
    np.testing.assert_allclose(over.grad, theirs[f"{name}_gradient"][given["mask"].numpy() > 0], rtol=1e-5, atol=1e-9)


def assert_same_policy_loss(
    how: Aggregation, advantages: Tensor, given: dict[str, Tensor], theirs: Any, name: str
) -> Tensor:
    now = sampled(given, "now").requires_grad_()
    losses, active = clipped_policy_loss(
        now, sampled(given, "old"), advantages[given["mask"] > 0], clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
    )
    rollouts = given["mask"].nonzero()[:, 0]
    weights = token_weights(how, rollouts, rollouts, length=LENGTH)
    assert_same(losses, weights, now, given, theirs, name)
    return active


@pytest.mark.parametrize("how", list(MODES))
def test_the_clipped_policy_loss_is_verl_s(given: dict[str, Tensor], verl: Any, how: Aggregation) -> None:
    active = assert_same_policy_loss(how, given["advantages"], given, verl, MODES[how])
    assert active.double().mean().item() == pytest.approx(float(verl["clipped"] + verl["far"]), rel=1e-6)
    assert verl["clipped"] > 0.1
    assert verl["far"] > 0.01


@pytest.mark.parametrize("how", list(MODES))
def test_grpo_from_rewards_to_loss_is_verl_s(given: dict[str, Tensor], verl: Any, how: Aggregation) -> None:
    advantages, _ = compute_grpo_outcome_advantage(given["outcome"], given["mask"], given["index"].numpy())
    assert_same_policy_loss(how, advantages, given, verl, f"grpo-{MODES[how]}")


@pytest.mark.parametrize("how", list(LOSS_TYPES))
def test_the_clipped_policy_loss_is_trl_s(given: dict[str, Tensor], trl: Any, how: Aggregation) -> None:
    assert_same_policy_loss(how, given["advantages"], given, trl, LOSS_TYPES[how])


def test_the_clipped_value_loss_is_verl_s(given: dict[str, Tensor], verl: Any) -> None:
    values = sampled(given, "values").requires_grad_()
    losses, active = clipped_value_loss(
        values, sampled(given, "old_values"), sampled(given, "returns"), clip=VALUE_CLIP
    )
    assert_same(losses, torch.full_like(losses, 1 / len(losses)), values, given, verl, "value")
    assert active.double().mean().item() == pytest.approx(float(verl["value_clipped"]), rel=1e-6)


def test_the_kl_estimators_are_verl_s(given: dict[str, Tensor], verl: Any) -> None:
    for name, ours in (("k1", torch.sub), ("k2", k2), ("k3", k3)):
        found = ours(given["now"], given["reference"]).clamp(max=10.0 if name == "k3" else None, min=-1e9)
        np.testing.assert_allclose(found, verl[name], rtol=1e-6, atol=1e-9)  # verl bounds k3 by 10
