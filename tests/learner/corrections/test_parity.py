"""The corrections and their gradients against verl's and TRL's, where they have the same one, run in a separate
environment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolwise.config.schema import ActorConfig
from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.corrections import build_loss

PEERS = Path(__file__).parents[3] / ".venv-bench" / "bin" / "python"
ROWS, LENGTH = 24, 16
ACTOR = ActorConfig.model_validate(
    {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "dual_clip": 3.0,
        "correction": {
            "sequence_low": 0.8,
            "sequence_high": 1.25,
            "cispo_high": 0.28,
            "gspo_low": 0.02,
            "gspo_high": 0.03,
        },
    }
)
"""The bounds of verl's mask of sequences are those of the inverse ratio: here both are the same."""

pytestmark = pytest.mark.skipif(not PEERS.exists(), reason="the peers' environment is missing: make bench-env")

VERL = """
import sys
import numpy as np, torch
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1], allow_pickle=False).items()}
mask, found = given["mask"], {}

def config(**options):
    options = {"strategy": "fsdp", "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1, "clip_ratio_c": 3.0, **options}
    return ActorConfig(**options)

def keep(name, kind, old, settings, weights=None, among=mask):
    now = given["now"].clone().requires_grad_()
    loss, _ = verl.get_policy_loss_fn(kind)(
        given[old], now, given["advantages"], among, "token-mean", settings, rollout_is_weights=weights
    )
    (loss * among.sum()).backward()
    found[name] = now.grad.numpy()

gap = given["old"] - given["mu"]
ppo = config(clip_ratio_low=0.2, clip_ratio_high=0.28)
keep("none", "vanilla", "old", ppo)
# Weights without a bound are those of decoupled PPO whose old policy is recomputed, and a mask above 2 its cap.
unbounded = (("decoupled", 1e9), ("decoupled, capped", "1e-9_2.0"))
for name, bounds in (("tis", 2.0), ("icepop", "0.5_5.0"), *unbounded):
    keep(name, "vanilla", "old", ppo, compute_rollout_correction_weights(gap, mask, "token", bounds)[0])
kept, _ = compute_rollout_rejection_mask(gap, mask, "seq_mean_k1", "0.8_1.25")
keep("sequence_mask", "vanilla", "old", ppo, among=kept)
keep("dppo", "dppo_tv", "mu", config(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9))
keep("cispo", "cispo", "mu", config(clip_ratio_low=1.0, clip_ratio_high=0.28))
keep("gspo", "gspo", "mu", config(clip_ratio_low=0.02, clip_ratio_high=0.03))
np.savez(sys.argv[2], **found)
"""

TRL = """
import sys
from collections import defaultdict
from types import SimpleNamespace
import numpy as np, torch
from trl import GRPOTrainer

given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1], allow_pickle=False).items()}
mask, found = given["mask"], {}
cases = {
    "cispo": ("cispo", "token", 0.0, 1.28), "gspo": ("dapo", "sequence", 0.02, 0.03),
    "decoupled": ("dapo", "token", 0.2, 0.28),
}
for name, (kind, level, low, high) in cases.items():
    three = name == "decoupled"  # of the sampler, at the start of the update, and now
    now = given["now"].clone().requires_grad_()
    advantages = given["advantages"] if level == "token" else given["outcome"]
    inputs = {
        "prompt_ids": mask[:, :1].long(), "prompt_mask": mask[:, :1], "completion_ids": mask.long(),
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": given["old" if three else "mu"],
        "importance_sampling_ratio": (given["old"] - given["mu"]).exp(), "num_items_in_batch": mask.sum(),
    }
    trainer = SimpleNamespace(
        args=SimpleNamespace(delta=3.0 if three else None, steps_per_generation=1), beta=0.0,
        epsilon_low=low, epsilon_high=high,
        loss_type=kind, max_completion_length=mask.shape[1], importance_sampling_level=level,
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, use_vllm=three,
        vllm_importance_sampling_correction=three,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )
    (GRPOTrainer._compute_loss(trainer, trainer.model, inputs) * mask.sum()).backward()
    found[name] = now.grad.numpy()
np.savez(sys.argv[2], **found)
"""


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shape = (ROWS, LENGTH)
    mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (ROWS, 1))) & (rng.random(shape) < 0.8)
    mask[:, 0] = True
    mu = -rng.exponential(size=shape)
    old = np.minimum(mu + 0.6 * rng.normal(size=shape), -0.01)
    return {
        "mask": mask.astype(np.float64),
        "mu": mu,
        "old": old,
        "now": np.minimum(old + 0.3 * rng.normal(size=shape), -0.01),
        "advantages": rng.normal(size=shape),
        "outcome": np.repeat(rng.normal(size=(ROWS, 1)), LENGTH, axis=1),
    }


def peer(script: str, folder: Path, given: dict[str, Any]) -> Any:
    np.savez(folder / "given.npz", **given)
    command = [str(PEERS), "-c", script, str(folder / "given.npz"), str(folder / "found.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "found.npz")


@pytest.fixture(scope="module")
def verl(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return peer(VERL, tmp_path_factory.mktemp("verl"), given)


@pytest.fixture(scope="module")
def trl(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return peer(TRL, tmp_path_factory.mktemp("trl"), given)


def gradient(name: str, given: dict[str, Any], advantages: str = "advantages") -> tuple[Any, Any]:
    """Of the summed losses by the log-probs, and which tokens there are."""
    mask = given["mask"] > 0
    tensors = {key: torch.from_numpy(values[mask]) for key, values in given.items()}
    capped = ACTOR.model_copy(update={"correction": ACTOR.correction.model_copy(update={"decoupled_cap": 2.0})})
    loss = build_loss(capped if "capped" in name else ACTOR, name.partition(",")[0])
    assert isinstance(loss, Correction)
    now, rows = tensors["now"].requires_grad_(), torch.from_numpy(mask.nonzero()[0])
    sampled = SampledWith(tensors["mu"], torch.zeros_like(rows), 1)
    losses, metrics = loss.corrected(now, tensors["old"], tensors[advantages], rows, sampled)
    losses.sum().backward()
    assert now.grad is not None
    shares = [values.mean().item() for key, values in metrics.items() if key in ("masked_frac", "truncated_frac")]
    shares = [] if name == "decoupled" else shares  # which has no bound
    assert all(0.02 < share < 0.98 for share in shares)  # both sides of every bound are compared
    return now.grad.numpy(), mask


@pytest.mark.parametrize(
    "name",
    ["none", "tis", "icepop", "decoupled", "decoupled, capped", "sequence_mask", "dppo", "cispo", "gspo"],
)
def test_the_gradient_is_verl_s(name: str, given: dict[str, Any], verl: Any) -> None:
    ours, mask = gradient(name, given)
    np.testing.assert_allclose(ours, verl[name][mask], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "advantages"), [("cispo", "advantages"), ("gspo", "outcome"), ("decoupled", "advantages")]
)
def test_the_gradient_is_trl_s(name: str, advantages: str, given: dict[str, Any], trl: Any) -> None:
    """TRL's ratio of a sequence has the gradient of the mean; with one advantage per sequence, that of the whole sum is
    the same: 1/n of n tokens."""
    ours, mask = gradient(name, given, advantages)
    np.testing.assert_allclose(ours, trl[name][mask], rtol=1e-6, atol=1e-9)
