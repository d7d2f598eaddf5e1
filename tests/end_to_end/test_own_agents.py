"""Agents that are not ours are trained: recorded over HTTP, scored, credited, resumed and evaluated like our own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.demo.recipe import ROUTABLE_KINDS
from toolwise.demo.tasks import make_rows
from toolwise.errors import ConfigError
from toolwise.protocols import Callback, Stop
from toolwise.types.events import ValidationEvent

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]
ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
ENVIRONMENTS = ROOT / ".venv-agents"
SETTINGS: dict[str, Any] = {
    "model": {"path": "builtin:small", "device": "cpu"},
    "data": {"batch_size": 12},
    "rollout": {"n": 8, "max_new_tokens": 48},
    "reward": {
        "function": "toolwise.demo.reward:small_world_reward",
        "kwargs": {"price_per_call": 0.0},
        "sandbox": {"trusted": ["toolwise.demo.reward"]},
    },
    "agent": {"max_concurrent": 3},
    "actor": {"lr": 3e-4, "warmup_steps": 1},
    "trainer": {"total_steps": 8, "console": False, "save_every": 100},
    "validation": {"every": 1},
}
GAIN, TIME_S = 0.2, 300.0
FRAMEWORKS = [
    ("openai_loop", "openai"),
    ("agents_sdk", "agents-sdk"),
    ("langgraph_agent", "langgraph"),
    ("verifiers_world", "verifiers"),
]
GRADED = """
import sys
sys.path.insert(0, {folder!r})
from plain_http import chat
from plain_http import run as answer

def run(task, base_url, api_key):
    answer(task, base_url, api_key)
    note = chat(base_url, api_key, [{{"role": "user", "content": "Say something."}}])
    return (len(note["content"] or "") % 7) / 7
"""


def test_a_run_of_an_agent_updates_the_actor_resumes_and_is_evaluated(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    (tmp_path / "mine.py").write_text(GRADED.format(folder=str(AGENTS)))
    config = make_config(
        tmp_path,
        {
            "tools": [],
            "reward": {"function": "agent"},
            "agent": {"run": "mine.py:run", "max_concurrent": 2},
            "rollout": {"n": 4},
            "data": {"val_limit": 1},
            "algorithm": {"adv_estimator": "gigpo"},
            "trainer": {"total_steps": 1},
            "validation": {"before": False},
        },
    )
    out = tmp_path / "run"
    trained = cli("train", config, "--out", out)
    assert trained.status == 0, trained.err
    resumed = cli("resume", out, "--set", "trainer.total_steps=2", "--set", "agent.max_concurrent=1")
    assert resumed.status == 0, resumed.err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["updated"]) == (2, True)
    assert summary["faults"] == dict.fromkeys(summary["faults"], 0) | {
        name: summary["faults"][name] for name in ("rollouts", "calls", "parse")
    }
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("canary/logprob_gap_max", 0.0) for line in metrics) < 1e-3
    assert max(line.get("tokens/forked", 0.0) for line in metrics) >= 8  # the second question is another conversation
    evaluated = cli("eval", out, "--json")
    assert evaluated.status == 0, evaluated.err
    assert json.loads(evaluated.out)["n"] == 1


class StopsOnceLearned(Callback):
    """Ends the run when the held-out score is higher by `GAIN` than before; `learned_s` is the time until then."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.scores: list[float] = []
        self.learned_s = float("inf")

    def on_validation(self, event: ValidationEvent) -> Stop | None:
        self.scores.append(event.metrics["eval/score"])
        if self.scores[-1] - self.scores[0] < GAIN:
            return None
        self.learned_s = time.monotonic() - self.start
        return Stop("the agent has learned")


def agent_section(name: str, environment: str) -> dict[str, Any]:
    """The settings of an agent of the examples in its environment; skips the test if that is not there."""
    if environment and not (ENVIRONMENTS / environment / ".ready").exists():
        pytest.skip(f"{ENVIRONMENTS.name}/{environment} is not there: `make agents-env` makes it, with a network")
    python = str(ENVIRONMENTS / environment / "bin" / "python") if environment else ""
    return {**SETTINGS["agent"], "run": f"{AGENTS / name}.py:run", "python": python}


@pytest.mark.parametrize(("name", "environment"), FRAMEWORKS)
def test_a_framework_takes_a_training_step(name: str, environment: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "agent": agent_section(name, environment),
        "data": {"batch_size": 1},
        "rollout": {"n": 4, "max_new_tokens": 32, "temperature": 1.5},
        "trainer": {"total_steps": 1, "console": False},
        "validation": {"before": False},
    }
    if name == "verifiers_world":
        changes["reward"] = {"function": "agent"}
    rows = list(make_rows(2000, seed=0, split="train", kinds=ROUTABLE_KINDS))
    out = tmp_path / "run"
    summary = toolwise.train(SETTINGS | changes, tasks=rows, out=out).summary
    assert (summary["steps"], summary["faults"]["env"], summary["faults"]["infrastructure"]) == (1, 0, 0)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in metrics if line["step"] == 1)
    assert 0 <= step["score/mean"] <= 1
    assert step["stop/answered"] > 0


def check_that_it_learns(name: str, environment: str, out: Path, **changes: Any) -> None:
    """Train an agent of the examples, in its environment, until it has learned; it must do so in time."""
    settings = SETTINGS | {"agent": agent_section(name, environment)}
    learned = StopsOnceLearned()
    summary = toolwise.train(
        settings | changes,
        tasks=list(make_rows(2000, seed=0, split="train", kinds=ROUTABLE_KINDS)),
        val=list(make_rows(50, seed=0, split="heldout", kinds=ROUTABLE_KINDS)),
        callbacks=[learned],
        out=out,
    ).summary
    end_s = time.monotonic() - learned.start
    print(f"\n{name}: {learned.scores}, learned after {learned.learned_s:.0f} s, {end_s:.0f} s in all")
    assert learned.learned_s <= TIME_S, learned.scores
    assert summary["faults"]["env"] == summary["faults"]["infrastructure"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "environment"),
    [("plain_http", ""), ("openai_loop", "openai"), ("agents_sdk", "agents-sdk"), ("langgraph_agent", "langgraph")],
)
def test_agents_of_real_frameworks_learn(name: str, environment: str, tmp_path: Path) -> None:
    check_that_it_learns(name, environment, tmp_path / "run")


@pytest.mark.long
def test_an_environment_of_verifiers_learns_from_tokens_that_it_rendered(tmp_path: Path) -> None:
    check_that_it_learns("verifiers_world", "verifiers", tmp_path / "run", reward={"function": "agent"})


@pytest.mark.long
def test_an_agent_learns_with_step_level_credit(tmp_path: Path) -> None:
    check_that_it_learns("plain_http", "", tmp_path / "run", algorithm={"adv_estimator": "gigpo"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": ["calculator"]}, "tools does not apply to an agent of your own"),
        ({"router": {"enable": True}}, "router.enable does not apply"),
        ({"env": {"name": "gsm8k"}}, "env.name does not apply"),
        ({"agent": {"run": "agent"}}, "is not a reference"),
        ({"agent": {"run": "a.py:run", "command": ["x"]}}, "set run or command, not both"),
    ],
)
def test_settings_that_mean_nothing_to_an_agent_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings = {"agent": {"run": "a.py:run"}, "trainer": {"console": False}} | changes
    with pytest.raises(ConfigError, match=said):
        toolwise.train(settings, tasks=[{"prompt": "a", "ground_truth": "b"}], out=tmp_path / "run")


def test_an_agent_must_be_loadable_by_another_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent: a lambda cannot be loaded by another process"):
        toolwise.train({}, tasks=[{"prompt": "a"}], agent=lambda task, url, key: 1.0, out=tmp_path / "run")
