"""Parity with verl's functions and TRL's formulas on random inputs, run in their own environment.

Compared where the definitions agree: groups of two or more, rewards that are not all equal, under the mask.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from toolwise.advantages.grpo import group_advantages

PEERS = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
GAMMA, LAM = 0.97, 0.9

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PEERS.exists(), reason="the peers' environment is missing: make bench-env"),
]

VERL = """
import sys
from types import SimpleNamespace
import numpy as np, torch
from verl.trainer.ppo import core_algos as verl

given = np.load(sys.argv[1], allow_pickle=False)
rewards, outcome, values, mask = (torch.from_numpy(given[k]) for k in ("rewards", "outcome", "values", "mask"))
index = np.array([str(i) for i in given["index"]], dtype=object)
gamma, lam = float(given["gamma"]), float(given["lam"])
found = {
    "grpo": verl.compute_grpo_outcome_advantage(outcome, mask, index),
    "dr_grpo": verl.compute_grpo_outcome_advantage(outcome, mask, index, norm_adv_by_std_in_grpo=False),
    "rloo": verl.compute_rloo_outcome_advantage(outcome, mask, index),
    "gae": verl.compute_gae_advantage_return(rewards, values, mask, gamma, lam),
    "reinforce": verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, SimpleNamespace(gamma=gamma)),
}
np.savez(sys.argv[2], **{f"{k}_{i}": part.numpy() for k, both in found.items() for i, part in enumerate(both)})
"""

TRL = """
import inspect, sys
import numpy as np, torch
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.utils import nanstd

# TRL has these formulas inside two long methods, not as functions; this detects changes there.
for module, line in (
    (grpo_trainer, "advantages = rewards - mean_grouped_rewards"),
    (grpo_trainer, "advantages = advantages / (std_rewards + 1e-4)"),
    (rloo_trainer, "baselines = (grouped_sum - grouped_rewards) / (scorable_counts - 1)"),
):
    assert line in inspect.getsource(module), line
rewards = torch.from_numpy(np.load(sys.argv[1], allow_pickle=False)["scores"])
grouped = rewards.view(-1, 8)
centred = rewards - torch.nanmean(grouped, dim=1).repeat_interleave(8)
np.savez(
    sys.argv[2],
    grpo=(centred / (nanstd(grouped, dim=1).repeat_interleave(8) + 1e-4)).numpy(),
    dr_grpo=centred.numpy(),
    rloo=(rewards - ((grouped.nansum(dim=1, keepdim=True) - grouped) / 7).view(-1)).numpy(),
)
"""


def peer(script: str, folder: Path, **arrays: Any) -> Any:
    given, taken = folder / "given.npz", folder / "taken.npz"
    np.savez(given, **arrays)
    done = subprocess.run(
        [str(PEERS), "-c", script, str(given), str(taken)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return np.load(taken)


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    rows, length = 96, 40
    # Replies with tool tokens in the middle and padding at the end; every row has a token.
    ends = rng.integers(5, length + 1, rows)
    mask = ((np.arange(length) < ends[:, None]) & (rng.random((rows, length)) < 0.8)).astype(np.float64)
    mask[:, 0] = 1
    outcome = np.zeros((rows, length))
    outcome[np.arange(rows), length - 1 - np.argmax(mask[:, ::-1], axis=1)] = rng.normal(size=rows)
    arrays = {
        "rewards": rng.normal(size=(rows, length)) * mask,
        "outcome": outcome,
        "values": rng.normal(size=(rows, length)),
        "mask": mask,
        "index": np.concatenate([np.arange(48) // 8, rng.integers(6, 12, 48)]),
        "gamma": np.array(GAMMA),
        "lam": np.array(LAM),
    }
    assert np.bincount(arrays["index"]).min() >= 2
    return arrays, peer(VERL, tmp_path_factory.mktemp("verl"), **arrays)


def assert_same(ours: Any, theirs: Any, mask: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a[mask > 0], b[mask > 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "form"), [("grpo", {}), ("dr_grpo", {"norm_by_std": False}), ("rloo", {"leave_one_out": True})]
)
def test_group_advantages_are_verl_s(verl: Any, name: str, form: dict[str, bool]) -> None:
    given, found = verl
    ours = compute_grpo_outcome_advantage(given["outcome"], given["mask"], given["index"], **form)
    assert_same(ours, (found[f"{name}_0"], found[f"{name}_1"]), given["mask"])


def test_gae_is_verl_s(verl: Any) -> None:
    given, found = verl
    ours = compute_gae_advantage_return(given["rewards"], given["values"], given["mask"], GAMMA, LAM)
    assert_same(ours, (found["gae_0"], found["gae_1"]), given["mask"])


def test_reinforce_plus_plus_is_verl_s(verl: Any) -> None:
    given, found = verl
    ours = compute_reinforce_plus_plus_outcome_advantage(given["rewards"], given["mask"], GAMMA)
    assert_same(ours, (found["reinforce_0"], found["reinforce_1"]), given["mask"])


def test_group_advantages_are_trl_s(tmp_path: Path) -> None:
    """TRL adds 1e-4 to the std where the papers' code adds 1e-6, and computes it in single precision."""
    scores = np.random.default_rng(1).normal(size=64)
    found = peer(TRL, tmp_path, scores=scores)
    groups = (np.arange(64) // 8).tolist()
    for name, form in (
        ("grpo", {"epsilon": 1e-4}),
        ("dr_grpo", {"norm_by_std": False}),
        ("rloo", {"leave_one_out": True}),
    ):
        settings: Any = form
        np.testing.assert_allclose(group_advantages(scores, groups, **settings), found[name], rtol=1e-6, atol=1e-7)
