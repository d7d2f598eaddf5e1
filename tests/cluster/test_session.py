"""The loops on rollout workers learn what they learn in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import Workers, cluster_config, train_alone, train_together

from toolwise.cluster.checks import check_cluster
from toolwise.cluster.interface import ClusterError
from toolwise.cluster.session import slots_per_worker
from toolwise.cluster.simulated import Weather
from toolwise.config.imports import GIVEN_IN_PYTHON
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.training.loop import StepResult
from toolwise.training.run import Run

CLUSTER = {"address": "local", "workers": 2}


def episodes(results: list[StepResult]) -> list[Any]:
    return [
        (s.rollout.rollout_id, s.result.score, [list(step.tokens.token_ids) for step in s.steps])
        for result in results
        for s in result.scored
    ]


def test_a_run_whose_workers_do_not_start_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = cluster_config(cluster={**CLUSTER, "max_restarts": 0})
    close, closed = Run.close, []
    monkeypatch.setattr(Run, "close", lambda run: closed.append(close(run)))
    with pytest.raises(ClusterError, match=r"died 1 times.*died while it started"):
        train_together(config, 1, tmp_path, Workers(Weather(failed_starts=1.0)))
    assert len(closed) == 2  # by the session, and by the helper


@pytest.mark.long
@pytest.mark.parametrize("trainer", [{}, {"mode": "async", "max_staleness": 0, "total_steps": 2}])
def test_workers_give_the_same_run_to_the_last_bit(trainer: dict[str, Any], tmp_path: Path) -> None:
    config = cluster_config(trainer=trainer, cluster=CLUSTER)
    alone, weights = train_alone(config, 2)
    assert all(result.metrics["actor/updates"] for result in alone)
    cluster = Workers()
    together, others, counts = train_together(config, 2, tmp_path, cluster)
    assert episodes(together) == episodes(alone)
    assert others == weights
    assert counts["whole_copies"] >= 2
    assert len(cluster.built) == 2


@pytest.mark.long
def test_a_worker_that_dies_changes_nothing_but_the_time(tmp_path: Path) -> None:
    config = cluster_config(cluster=CLUSTER)
    alone, weights = train_alone(config, 2)
    assert all(result.metrics["actor/updates"] for result in alone)
    cluster = Workers()
    calls = []

    def kill_one(self: Workers, method: str) -> None:
        calls.append(method)
        if calls.count("roll_out") in (2, 4) and method == "roll_out":
            self.end(self.alive[0], "out of memory")

    cluster.on_call = kill_one
    together, others, counts = train_together(config, 2, tmp_path, cluster)
    assert episodes(together) == episodes(alone)
    assert others == weights
    assert counts["deaths"] == 2
    assert len(cluster.built) == 4
    events = [json.loads(line) for line in (tmp_path / "cluster.jsonl").read_text().splitlines()]
    assert {event["process"] for event in events if event["event"] == "group"} == {"worker-0", "worker-1"}
    assert any(event["event"] == "counters" and "engine/blocks" in event for event in events)


@pytest.mark.long
def test_adapters_alone_are_sent(tmp_path: Path) -> None:
    config = cluster_config(cluster=CLUSTER, actor={"lr": 1e-2, "lora": {"rank": 2}})
    alone, weights = train_alone(config, 2)
    assert all(result.metrics["actor/updates"] for result in alone)
    together, others, _ = train_together(config, 2, tmp_path, Workers())
    assert episodes(together) == episodes(alone)
    assert others == weights
    events = [json.loads(line) for line in (tmp_path / "cluster.jsonl").read_text().splitlines()]
    sent = [event["bytes"] for event in events if event["event"] == "weights"]
    assert sent
    assert max(sent) < 400_000  # the model has 3.5 MB


GRADED = """
import json
import urllib.request

def chat(base_url, api_key, messages):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]

def run(task, base_url, api_key):
    prompt = [{"role": "user", "content": task["prompt"][-1]["content"]}]
    first = chat(base_url, api_key, prompt)
    answer = {"role": "assistant", "content": first["content"] or ""}
    again = chat(base_url, api_key, [*prompt, answer, {"role": "user", "content": "Are you sure?"}])
    return (len(again["content"] or "") % 7) / 7
"""


@pytest.mark.long
def test_an_agent_of_the_users_own_runs_on_workers(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "graded.py").write_text(GRADED)
    config = cluster_config(
        agent={"run": f"{folder / 'graded.py'}:run", "max_concurrent": 1},  # one call at a time: the same batches
        reward={"function": "agent", "kwargs": {}},
        tools=[],
        cluster=CLUSTER,
        deterministic=False,
    )
    assert slots_per_worker(config) == 1
    alone, _ = train_alone(config, 2)
    assert all(result.metrics["actor/updates"] for result in alone)
    together, _, _ = train_together(config, 2, tmp_path / "run", Workers())
    assert episodes(together) == episodes(alone)
    for name in ("score/mean", "actor/grad_norm"):  # engines that cached other prompts round in another way
        assert [r.metrics[name] for r in together] == pytest.approx([r.metrics[name] for r in alone], rel=1e-3)


ROUTED: dict[str, Any] = {"enable": True, "wording": "silent", "lr": 0.05, "cost": "calls", "budgets": [{"limit": 0.5}]}
CAPPED = {"budget_prompt": True, "max_cost": 1.0, "random_budgets": {"low": 0.1, "high": 0.9, "bins": 3}}


@pytest.mark.long
@pytest.mark.parametrize("router", [{"every": "turn"}, CAPPED])
def test_a_router_that_needs_more_than_the_prompt_routes_on_workers(router: dict[str, Any], tmp_path: Path) -> None:
    config = cluster_config(router={**ROUTED, **router}, cluster=CLUSTER, multi_turn={"max_turns": 3})
    alone, weights = train_alone(config, 3)
    together, others, _ = train_together(config, 3, tmp_path, Workers())
    assert episodes(together) == episodes(alone)
    assert others == weights
    for name in ("router/loss", "router/entropy", "router/r_task"):
        assert [result.metrics[name] for result in together] == [result.metrics[name] for result in alone]
    assert alone[-1].metrics["router/entropy"] < alone[0].metrics["router/entropy"]  # it has learned
    routes = [[list(s.rollout.turn_routes) for s in result.scored] for result in (*alone, *together)]
    assert routes[:3] == routes[3:]
    assert bool(routes[0][0]) == ("every" in router)


@pytest.mark.long
def test_asynchronous_training_stays_within_its_staleness(tmp_path: Path) -> None:
    trainer = {"mode": "async", "max_staleness": 1, "total_steps": 3}
    config = cluster_config(trainer=trainer, cluster=CLUSTER, deterministic=False)
    results, _, _ = train_together(config, 3, tmp_path, Workers())  # raises if a token is older
    assert len(results) == 3
    assert all(len(result.scored) == 6 for result in results)


def test_a_worker_takes_its_share_of_the_batches() -> None:
    base = {"data": {"batch_size": 12}, "rollout": {"n": 4}}
    assert slots_per_worker(RunConfig.model_validate({**base, "cluster": {"workers": 5}})) == 3
    trainer = {"mode": "async", "max_staleness": 1}
    assert slots_per_worker(RunConfig.model_validate({**base, "trainer": trainer, "cluster": {"workers": 5}})) == 5
    assert slots_per_worker(RunConfig.model_validate({**base, "cluster": {"groups_per_worker": 2}})) == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tools": [f"{GIVEN_IN_PYTHON}the tool f"]}, "the tool f"),
        ({"router": {"enable": True, "optimizer": "actor"}, "cluster": {"learners": 2}}, "router.optimizer"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_at_the_start(settings: dict[str, Any], named: str) -> None:
    cluster = {"address": "local", **settings.pop("cluster", {})}
    with pytest.raises(ConfigError, match=named):
        check_cluster(RunConfig.model_validate({**settings, "cluster": cluster}))
