"""A group of learners is a learner; on real Ray a run with two learns, one of them dies, and other numbers go on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import async_cases
import numpy as np
import pytest
from cluster_cases import build, cluster_config, train_alone, train_steps

from toolwise import Callback
from toolwise.cluster import learner_group
from toolwise.cluster.interface import (
    CallTimeoutError,
    ClusterError,
    Payload,
    ProcessDiedError,
    RemoteCallError,
    Resources,
    Stored,
    payload_bytes,
)
from toolwise.cluster.learner_codec import UPDATED
from toolwise.cluster.learner_group import LearnerGroup, LearnersLostError
from toolwise.cluster.learner_state import LearnerState
from toolwise.cluster.learner_worker import LearnerWorker
from toolwise.cluster.node_files import pack_settings
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.cluster.weight_transfer import install
from toolwise.config.schema import RunConfig
from toolwise.learner.actor import Actor

RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")


class KillsLearner(Callback):
    """Kills a learner's process after the second step, once."""

    def on_step(self, event: Any) -> None:
        marker = event.run_folder / "killed"
        if event.step == 2 and not marker.exists():
            marker.touch()
            lines = map(json.loads, (event.run_folder / "cluster.jsonl").read_text().splitlines())
            os.kill([line["pid"] for line in lines if line["process"] == "learner-1"][-1], signal.SIGKILL)


def settings(**cluster: Any) -> dict[str, Any]:
    return {
        "cluster": {"workers": 1, "worker_cpus": 0.5, "learners": 2, "learner_cpus": 0.5, **cluster},
        "rollout": {"n": 4},
        "trainer": {"total_steps": 3, "save_every": 1},
    }


def train(cli: Any, config: Path, out: Path, *options: Any) -> dict[str, Any]:
    ended = cli("train", config, "--cluster", "local", "--out", out, *options)
    assert ended.status == 0, ended.err
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.fixture
def learners() -> Iterator[SimulatedCluster]:
    """Real learners in this process, one at a time: torch has one process group."""
    built: list[LearnerWorker] = []

    def build_learner(payload: Payload) -> LearnerWorker:
        while built:
            built.pop().close()
        built.append(LearnerWorker("learner-0", payload))
        return built[-1]

    yield SimulatedCluster({"learner": build_learner}, Weather())
    while built:
        built.pop().close()


def new_group(cluster: SimulatedCluster, config: RunConfig) -> LearnerGroup:
    settings, files = pack_settings(config)
    run = build(config)
    run.close()
    group = LearnerGroup(cluster, config, cast("Actor", run.learner), settings, Stored(files, 0))
    group.start()
    return group


@pytest.mark.parametrize("actor", [{}, pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.long)])
def test_a_group_learns_saves_and_goes_on_as_one_process(
    actor: dict[str, Any], learners: SimulatedCluster, tmp_path: Path
) -> None:
    config = cluster_config(
        actor={"lr": 1e-3, "mismatch_check": "off", **actor},
        algorithm={"kl": "loss", "kl_coef": 0.1},
        cluster={"address": "local", "learners": 1},
    )
    batches: list[Any] = []
    expected: list[str] = []
    updated: list[Any] = []
    run = build(config)
    update = run.learner.update
    run.learner.update = lambda credited: batches.append(credited) or update(credited)  # type: ignore[method-assign]
    for _ in range(2):
        asyncio.run(train_steps(run, 1))
        expected.append(run.learner.weights_checksum())
        updated.append(run.learner.updated)
    run.close()
    group = new_group(learners, config)
    scored = [c.annotated.scored for c in batches[0]]
    for mine, its in zip(group.annotate(scored), (c.annotated for c in batches[0]), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine.ref_logprobs or (), its.ref_logprobs or (), strict=True))
    assert group.update(batches[0])["actor/updates"] == 1.0
    assert group.updated.keys() == updated[0].keys() == {c.rollout.rollout_id for c in batches[0]}
    for name, tokens in updated[0].items():
        for column in UPDATED:
            found, wanted = getattr(group.updated[name], column), getattr(tokens, column)
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted, equal_nan=column != "clipped")
    assert group.weights_checksum() == expected[0]
    state, weights = group.state_dict(), group.weights_to_save()
    group.save_model(tmp_path, None if weights is None else dict(weights))
    group.update(batches[1])
    assert (group.version, group.weights_checksum()) == (2, expected[1])
    group.close()
    later = new_group(learners, config)
    later.load_state_dict(state)
    later.load_weights(tmp_path)
    assert (later.version, later.weights_checksum()) == (1, expected[0])
    later.update(batches[1])
    assert later.weights_checksum() == expected[1]
    later.close()


@pytest.mark.long
def test_learners_send_what_changed_to_the_process_of_the_run(
    learners: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cluster_config(
        actor={"lr": 1e-10, "mismatch_check": "off"},  # changes the bits of a few weights, as larger steps do in bf16
        cluster={"address": "local", "learners": 1},
    )
    run = build(config)
    batches: list[Any] = []
    update = run.learner.update
    run.learner.update = lambda credited: batches.append(credited) or update(credited)  # type: ignore[method-assign]
    asyncio.run(train_steps(run, 3))
    run.close()
    group, sent = new_group(learners, config), []

    def record(weights: Any, payload: Payload, current: int) -> Any:
        sent.append((payload["version"], payload["base"], payload_bytes(payload)))
        return install(weights, payload, current)

    monkeypatch.setattr(learner_group, "install", record)
    for index, batch in enumerate(batches):
        if index == 2:
            group._install_weights()  # as if the router had changed them
        group.update(batch)
    assert group.weights_checksum() == run.learner.weights_checksum()
    assert [(version, base) for version, base, _ in sent] == [(1, -1), (2, 1), (3, -1)]
    assert sent[1][2] < 0.5 * sent[0][2]
    group.close()


def test_learning_goes_on_while_the_learners_write_their_state(
    learners: SimulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = new_group(learners, cluster_config(cluster={"address": "local", "learners": 1}))
    learned, write = threading.Event(), LearnerState.write

    def write_later(state: LearnerState, folder: Path) -> dict[str, Any]:
        assert learned.wait(60.0), "the update waits for the checkpoint"
        return write(state, folder)

    monkeypatch.setattr(LearnerState, "write", write_later)
    weights = dict(group.local.model.state_dict())
    group.weights_to_save()
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(group.save_model, tmp_path, weights)
        group.update([])
        learned.set()
        saving.result(60.0)
    assert (tmp_path / "learners" / "learners.json").is_file()
    group.close()


@pytest.mark.long
def test_a_router_that_trains_the_actors_weights_gives_them_to_the_learners(learners: SimulatedCluster) -> None:
    router = {"enable": True, "backbone": "full", "wording": "silent", "lr": 1e-3, "budgets": [{"limit": 0.5}]}
    config = cluster_config(router=router, cluster={"address": "local", "learners": 1})
    expected, weights = train_alone(config, 3)
    run = build(config)
    settings, files = pack_settings(config)
    group = LearnerGroup(learners, config, cast("Actor", run.learner), settings, Stored(files, 0))
    group.start()
    found = asyncio.run(train_steps(replace(run, learner=group), 3))
    assert group.weights_checksum() == weights
    for name in ("router/loss", "actor/loss", "actor/grad_norm"):
        assert [result.metrics.get(name) for result in found] == [result.metrics.get(name) for result in expected]
    group.close()
    run.close()


def test_a_group_without_its_learners_says_so(learners: SimulatedCluster) -> None:
    group = new_group(learners, cluster_config(cluster={"address": "local", "learners": 1}))
    learners.end(learners.alive[0], "out of memory")
    with pytest.raises(LearnersLostError, match="out of memory"):
        group.update([])
    with pytest.raises(LearnersLostError, match="no learners"):
        group.update([])
    group.close()


class Fails:
    """A learner whose code raises `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def handle(self, method: str, payload: Payload) -> Payload:
        raise self.error


def with_traceback(message: str, text: str) -> RemoteCallError:
    error = RemoteCallError(message)
    error.add_note(text)
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RemoteCallError("learner-0: ValueError: no such loss"), False),
        (RemoteCallError("learner-0: RuntimeError: [/x/gloo/transport/tcp/pair.cc:5] Connection closed"), True),
        (with_traceback("learner-0: Last error:", "torch.distributed.DistBackendError: …"), True),
        (ProcessDiedError("learner-0 died: out of memory"), True),
        (CallTimeoutError("learner-0 did not answer update within 9 s"), True),
    ],
)
def test_only_lost_learners_start_again(error: Exception, lost: bool) -> None:
    cluster = SimulatedCluster({"learner": lambda payload: Fails(error)}, Weather())
    local = cast("Actor", SimpleNamespace(model=None))
    group = LearnerGroup(cluster, cluster_config(cluster={"address": "local", "learners": 1}), local, {}, None)
    group._ranks = [group._wait(cluster.start("learner", "learner-0", {}, Resources(), deadline_s=1.0))]
    with pytest.raises(ClusterError) as raised:
        group._call("update", [{}])
    assert str(error) in str(raised.value)
    assert isinstance(raised.value, LearnersLostError) == lost
    assert not cluster.alive
    with pytest.raises(ClusterError) as later:  # such as when the run tries to save its state
        group._call("snapshot", [{}])
    assert isinstance(later.value, LearnersLostError) == lost
    group.close()


@pytest.mark.long
@RAY
@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_a_run_of_two_learners_goes_on_with_one_and_with_three(
    sharding: str, cli: Any, make_config: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    config = make_config(tmp_path, settings(sharding=sharding))
    assert train(cli, config, out)["steps"] == 3
    state = max((out / "checkpoints").iterdir()) / "model" / "learners"
    assert {path.name for path in state.iterdir()} == {
        "learners.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    }
    for steps, learners in ((4, 1), (5, 3)):
        changes = ("--set", f"trainer.total_steps={steps}", "--set", f"cluster.learners={learners}", "--resume")
        assert train(cli, config, out, *changes)["steps"] == steps


@pytest.mark.long
@RAY
@pytest.mark.parametrize("saved_by", [1, 4])
def test_a_run_goes_on_alike_with_any_number_of_learners(
    saved_by: int, cli: Any, make_config: Any, tmp_path: Path
) -> None:
    """Each number continues a copy of the run by one step, from the same rollouts."""
    changes = settings(learners=saved_by, learner_cpus=0.25)
    changes["trainer"] = {"total_steps": 1, "save_every": 1}
    config, out = make_config(tmp_path, changes), tmp_path / "run"
    train(cli, config, out)
    found = {}
    for learners in (1, 2, 8):
        copy = Path(shutil.copytree(out, tmp_path / f"run-{learners}"))
        options = ("--set", "trainer.total_steps=2", "--set", f"cluster.learners={learners}", "--resume")
        assert train(cli, config, copy, *options)["steps"] == 2
        steps = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        found[learners] = [line for line in steps if line["step"] == 2 and "actor/updates" in line][-1]
    for name in ("score/mean", "actor/grad_norm", "actor/loss"):
        expected = found[1].get(name)
        assert [line.get(name) for line in found.values()] == [expected and pytest.approx(expected, rel=1e-3)] * 3


@pytest.mark.long
@RAY
@pytest.mark.parametrize("backbone", ["frozen", "full"])
def test_two_learners_and_a_router_have_the_gradients_of_one_process(
    backbone: str, cli: Any, make_config: Any, tmp_path: Path
) -> None:
    """Of the head, which the process of the run trains on the weights of the learners, and of the actor, which learns
    beside a router that may change its weights."""
    router = {"enable": True, "backbone": backbone, "wording": "silent", "lr": 1e-3, "budgets": [{"limit": 0.5}]}
    changes = settings() | {"router": router, "deterministic": True, "rollout": {"n": 4, "temperature": 2.0}}
    changes["reward"] = {"function": f"{async_cases.__file__}:by_length", "sandbox": {"tier": "off"}}
    config, found = make_config(tmp_path, changes), []
    for cluster in ((), ("--cluster", "local")):
        out = tmp_path / f"run-{len(found)}"
        ended = cli("train", config, *cluster, "--out", out)
        assert ended.status == 0, ended.err
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found.append([line for line in lines if "router/grad_norm" in line])
    for alone, together in zip(*found, strict=True):
        assert alone["router/grad_norm"] > 0.0
        for name in ("score/mean", "router/loss", "router/grad_norm", "actor/loss", "actor/grad_norm"):
            assert together.get(name) == pytest.approx(alone.get(name), rel=1e-4, abs=1e-7), name
    assert sum(line.get("actor/grad_norm", 0.0) > 0.0 for line in found[0]) > 1


@pytest.mark.long
@RAY
def test_a_group_starts_again_when_a_learner_dies(cli: Any, make_config: Any, tmp_path: Path) -> None:
    changes = settings()
    changes["trainer"]["callbacks"] = [f"{__file__}:KillsLearner"]
    assert train(cli, make_config(tmp_path, changes), tmp_path / "run")["steps"] == 3
    assert (tmp_path / "run" / "killed").exists()
