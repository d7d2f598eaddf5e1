"""Time the advantage estimators against a pandas group-by and verl's loop.

    python benchmarks/estimators.py           all parts, about two minutes
    python benchmarks/estimators.py gigpo     the array core on 10 k, 100 k and 1 M steps, against pandas
    python benchmarks/estimators.py steps     cost per step of the form over StepData, beyond the arrays
    python benchmarks/estimators.py grpo      2,048 samples, against verl's default (a loop) and its vectorized form

pandas and verl run in their own environment (`make bench-env`, .venv-bench), on the same arrays, one thread each, and
must give the same numbers. Times are CPU time, the minimum of several runs, because the machine may be busy; its load
average is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from toolwise.advantages import apply_gigpo_to_batch_steps, compute_grpo_outcome_advantage
from toolwise.advantages.gigpo import gigpo_advantages
from toolwise.advantages.step_rewards import Episodes, add_terminal_scores
from toolwise.messages import Message
from toolwise.types import StepData

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-bench" / "bin" / "python"
GAMMA, OMEGA, REPEATS = 0.95, 0.5, 7
SIZES = (10_000, 100_000, 1_000_000)
STEPS_A_GROUP, ROLLOUTS_A_GROUP, STATES = 100, 8, 60

PANDAS = """
import json, sys, time
import numpy as np, pandas as pd
data = np.load(sys.argv[1]); gamma, omega = 0.95, 0.5
rollouts = pd.DataFrame({"group": data["groups"], "score": data["scores"]})
steps = pd.DataFrame({"rollout": np.repeat(np.arange(len(rollouts)), data["lengths"]), "reward": data["rewards"],
                      "anchor": data["anchors"]})

def normalized(frame, keys, column):
    grouped = frame.groupby(keys, sort=False)[column]
    mean, std = grouped.transform("mean"), grouped.transform("std")
    return ((frame[column] - mean) / (std + 1e-6)).fillna(0.0)

def gigpo():
    frame = steps.copy(deep=False)
    frame["group"] = rollouts["group"].to_numpy()[frame["rollout"]]
    power = gamma ** frame.groupby("rollout", sort=False).cumcount()
    discounted = frame["reward"] * power
    frame["G"] = discounted[::-1].groupby(frame["rollout"][::-1], sort=False).cumsum()[::-1] / power
    episode = normalized(rollouts, "group", "score")
    return omega * episode.to_numpy()[frame["rollout"]] + (1 - omega) * normalized(frame, ["group", "anchor"], "G")

times = []
for _ in range(int(sys.argv[2])):
    began = time.process_time(); out = gigpo(); times.append(time.process_time() - began)
np.save(sys.argv[3], out.to_numpy()); print(json.dumps(min(times)))
"""

VERL = """
import json, sys, time
import numpy as np, torch
from verl.trainer.ppo import core_algos
torch.set_num_threads(1)
data = np.load(sys.argv[1])
rewards, mask = torch.from_numpy(data["rewards"]), torch.from_numpy(data["mask"])
index = np.array([f"prompt-{i}" for i in data["index"]], dtype=object)
out = {}
for name in ("compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage"):
    times = []
    for _ in range(int(sys.argv[2])):
        began = time.process_time(); found, _ = getattr(core_algos, name)(rewards, mask, index)
        times.append(time.process_time() - began)
    out[name] = min(times)
    if name == "compute_grpo_outcome_advantage": np.save(sys.argv[3], found.numpy())
print(json.dumps(out))
"""


def best(work: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, Any]:
    times, found = [], None
    for _ in range(repeats):
        began = time.process_time()
        found = work()
        times.append(time.process_time() - began)
    return min(times), found


def peer(script: str, arrays: dict[str, Any], repeats: int) -> tuple[Any, Any]:
    """What `script` prints in the peers' environment, and the array it saves."""
    if not PEERS.exists():
        sys.exit(f"{PEERS} is missing: make bench-env")
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder, "given.npz"), Path(folder, "taken.npy")
        np.savez(given, **arrays)
        done = subprocess.run(
            [str(PEERS), "-c", script, str(given), str(repeats), str(taken)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1]), np.load(taken)


def episodes(steps: int, seed: int = 0) -> tuple[Episodes, Any]:
    """Rollouts of 5 to 20 steps, eight per group, in environments of 60 states of which a few are visited often."""
    rng = np.random.default_rng(seed)
    count = max(1, steps // STEPS_A_GROUP) * ROLLOUTS_A_GROUP
    lengths = rng.integers(5, 21, count)
    lengths[-1] += max(0, steps - int(lengths.sum()))
    lengths = lengths[np.cumsum(lengths) <= steps]
    groups = np.arange(len(lengths)) // ROLLOUTS_A_GROUP
    scores = rng.integers(0, 2, len(lengths)).astype(np.float64)
    total = int(lengths.sum())
    base = np.full(total, np.nan)
    rewards, _ = add_terminal_scores(base, scores, lengths, "remainder")
    anchors = np.minimum(rng.geometric(0.08, total), STATES).astype(np.intp)
    return Episodes(scores, groups, lengths, rewards), anchors


def gigpo() -> None:
    print(f"{'steps':>10} {'groups':>8} {'anchors':>9} {'ours':>10} {'/ step':>9} {'pandas':>10} {'ratio':>7}   apart")
    for anchors_as in ("small numbers", "64-bit hashes"):
        for size in SIZES:
            batch, anchors = episodes(size)
            if anchors_as == "64-bit hashes":
                anchors = np.random.default_rng(1).integers(-(2**62), 2**62, STATES + 1)[anchors]
            seconds, credit = best(lambda b=batch, a=anchors: gigpo_advantages(b, a, omega=OMEGA, gamma=GAMMA))
            arrays = {"groups": batch.groups, "scores": batch.scores, "lengths": batch.lengths}
            theirs, found = peer(PANDAS, arrays | {"rewards": batch.rewards, "anchors": anchors}, REPEATS)
            apart = float(np.abs(found - credit.advantages).max())
            total = len(batch.rewards)
            print(
                f"{total:>10,} {int(batch.groups.max()) + 1:>8,} {int(credit.metrics()['gigpo/n_anchor_groups']):>9,} "
                f"{seconds * 1e3:>7.2f} ms {seconds / total * 1e9:>6.0f} ns {theirs * 1e3:>7.1f} ms "
                f"{seconds / theirs:>7.2f}   {apart:.0e}   (anchors are {anchors_as})"
            )


def steps() -> None:
    batch, anchors = episodes(20_000)
    rollouts, first = [], 0
    for length in batch.lengths.tolist():
        rollouts.append([step(int(a)) for a in anchors[first : first + length]])
        first += length
    scores, groups = batch.scores.tolist(), batch.groups.tolist()
    total = len(batch.rewards)
    core, credit = best(lambda: gigpo_advantages(batch, anchors, omega=OMEGA, gamma=GAMMA))
    for name, hashing in (("state_key", None), ("last observation", "last_observation"), ("a function", len)):
        whole, found = best(
            lambda h=hashing: apply_gigpo_to_batch_steps(rollouts, scores, OMEGA, GAMMA, h, group_ids=groups), 5
        )
        same = name == "a function" or np.allclose(
            [s.advantage for r in found for s in r], credit.advantages, rtol=0, atol=1e-12
        )
        print(
            f"{total:,} StepData by {name:<17} {whole / total * 1e6:6.2f} µs per step, "
            f"{(whole - core) / total * 1e6:.2f} of it beyond the arrays' {core / total * 1e6:.2f}; same: {same}"
        )


def step(anchor: int) -> StepData:
    seen = [Message(role="user", content="go"), Message(role="assistant", content="north")]
    return StepData(
        system_step_index=0,
        observation_data=[*seen, Message(role="tool", content=f"You are in room {anchor}. " + "It is dark. " * 10)],
        action_taken={"type": "text"},
        resulting_messages_history=[],
        step_info={"state_key": f"room {anchor}"},
    )


def grpo() -> None:
    import torch

    torch.set_num_threads(1)
    print(f"{'samples':>10} {'tokens':>7} {'ours':>10} {'verl, loop':>12} {'faster':>8} {'verl, vec.':>12}   apart")
    for length in (64, 1024):
        rng = np.random.default_rng(0)
        samples = 2048
        mask = (np.arange(length) < rng.integers(1, length + 1, samples)[:, None]).astype(np.float32)
        rewards = np.zeros((samples, length), dtype=np.float32)
        rewards[np.arange(samples), mask.sum(1).astype(int) - 1] = rng.normal(size=samples)
        index = np.arange(samples) // 8
        told = np.array([f"prompt-{i}" for i in index], dtype=object)
        given = torch.from_numpy(rewards), torch.from_numpy(mask)
        seconds, (found, _) = best(lambda g=given, t=told: compute_grpo_outcome_advantage(g[0], g[1], t), 100)
        theirs, taken = peer(VERL, {"rewards": rewards, "mask": mask, "index": index}, 10)
        loop, vectorised = theirs.values()
        apart = float(np.abs(found.numpy() - taken).max())
        print(
            f"{samples:>10,} {length:>7,} {seconds * 1e3:>7.2f} ms {loop * 1e3:>9.1f} ms {loop / seconds:>7.0f}× "
            f"{vectorised * 1e3:>9.2f} ms   {apart:.0e}"
        )


PARTS = {"gigpo": gigpo, "steps": steps, "grpo": grpo}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        print(f"— {part} (load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
        PARTS[part]()
