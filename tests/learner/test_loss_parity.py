"""The losses and their gradients beside verl's functions on random inputs, run in their own environment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from toolwise.learner.aggregation import Aggregation, token_weights
from toolwise.learner.kl import k1, k2, k3
from toolwise.learner.losses import clipped_policy_loss, clipped_value_loss

PEERS = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
LOW, HIGH, DUAL, VALUE_CLIP, LENGTH = 0.2, 0.28, 3.0, 0.2, 24
MODES: dict[Aggregation, str] = {
    "token": "token-mean",
    "rollout": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PEERS.exists(), reason="the peers' environment is missing: make bench-env"),
]

VERL = """
import sys
import numpy as np, torch
from verl.trainer.ppo import core_algos as verl

given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1], allow_pickle=False).items()}
mask, found = given["mask"], {}

def keep(name, loss, over):
    loss.backward()
    found[name], found[name + "_gradient"] = loss.detach().numpy(), over.grad.numpy()

for mode in sys.argv[3:]:
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


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Any]:
    rng = np.random.default_rng(3)
    shape = (48, LENGTH)
    # Replies of any length with a tool's tokens in their midst; ratios far on both sides of every clip.
    mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (48, 1))) & (rng.random(shape) < 0.8)
    mask[:, 0] = True
    old = -rng.exponential(size=shape)
    values = rng.normal(size=shape)
    given = {
        "mask": mask.astype(np.float64),
        "old": old,
        "now": old + 0.8 * rng.normal(size=shape),
        "reference": old + 0.5 * rng.normal(size=shape),
        "advantages": rng.normal(size=shape),
        "values": values,
        "old_values": values + 0.4 * rng.normal(size=shape),
        "returns": rng.normal(size=shape),
    }
    folder = tmp_path_factory.mktemp("verl")
    np.savez(folder / "given.npz", **given)
    command = [str(PEERS), "-c", VERL, str(folder / "given.npz"), str(folder / "taken.npz"), *MODES.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: torch.from_numpy(array) for name, array in given.items()}, np.load(folder / "taken.npz")


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


@pytest.mark.parametrize("how", list(MODES))
def test_the_clipped_policy_loss_is_verl_s(both: Any, how: Aggregation) -> None:
    given, theirs = both
    now = sampled(given, "now").requires_grad_()
    losses, active = clipped_policy_loss(
        now, sampled(given, "old"), sampled(given, "advantages"), clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
    )
    rollouts = given["mask"].nonzero()[:, 0]
    weights = token_weights(how, rollouts, rollouts, length=LENGTH)
    assert_same(losses, weights, now, given, theirs, MODES[how])
    assert active.double().mean().item() == pytest.approx(float(theirs["clipped"] + theirs["far"]), rel=1e-6)
    assert theirs["clipped"] > 0.1
    assert theirs["far"] > 0.01


def test_the_clipped_value_loss_is_verl_s(both: Any) -> None:
    given, theirs = both
    values = sampled(given, "values").requires_grad_()
    losses, active = clipped_value_loss(
        values, sampled(given, "old_values"), sampled(given, "returns"), clip=VALUE_CLIP
    )
    assert_same(losses, torch.full_like(losses, 1 / len(losses)), values, given, theirs, "value")
    assert active.double().mean().item() == pytest.approx(float(theirs["value_clipped"]), rel=1e-6)


def test_the_kl_estimators_are_verl_s(both: Any) -> None:
    given, theirs = both
    for name, ours in (("k1", k1), ("k2", k2), ("k3", k3)):
        found = ours(given["now"], given["reference"]).clamp(max=10.0 if name == "k3" else None, min=-1e9)
        np.testing.assert_allclose(found, theirs[name], rtol=1e-6, atol=1e-9)  # verl bounds k3 by 10
