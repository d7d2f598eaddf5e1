"""An own agent through the public API: what is found before a run starts, and what is said about its reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.errors import ConfigError
from toolwise.rollout.agents.agent_request import UNUSED_REWARD

CODE = """
import json, urllib.request

def ask(task, base_url, api_key):
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    body = json.dumps({"messages": task["prompt"], "max_tokens": 2}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers), timeout=20).read()
    return 1.0

def raises(task, base_url, api_key):
    ask(task, base_url, api_key)
    raise ValueError("boom")
"""
TASKS: list[dict[str, Any]] = [{"prompt": "What is 3 + 4?", "ground_truth": "7"}]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def evaluate(agent: str, reward: str) -> dict[str, Any]:
    return toolwise.evaluate("builtin:small", TASKS, config={"agent": {"run": agent}, "reward": {"function": reward}})


def test_a_run_whose_agent_does_not_load_does_not_start(code: Path, tmp_path: Path) -> None:
    config = {"agent": {"run": f"{code}:nothing"}, "reward": {"function": "agent"}, "trainer": {"console": False}}
    with pytest.raises(ConfigError, match=r"mine\.py:nothing' does not load: .* has no nothing"):
        toolwise.train(config, model="builtin:small", tasks=TASKS, out=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_returned_reward_beside_another_reward_is_said(code: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert evaluate(f"{code}:ask", "agent")["score"] == 1.0
    assert UNUSED_REWARD not in caplog.text
    evaluate(f"{code}:ask", "env")
    assert UNUSED_REWARD in caplog.text


def test_an_agent_that_raises_is_blamed_with_its_line(code: Path) -> None:
    message = r"^the agent failed on 1 of 1 rollouts.*agent\.run failed: ValueError: boom \(mine\.py:12\)"
    with pytest.raises(toolwise.ToolwiseError, match=message):
        evaluate(f"{code}:raises", "agent")


def test_an_interpreter_that_is_not_there_is_said_at_the_start(code: Path) -> None:
    config = {"agent": {"run": f"{code}:ask", "python": "no-such-python"}, "reward": {"function": "agent"}}
    with pytest.raises(ConfigError, match="no-such-python"):
        toolwise.evaluate("builtin:small", TASKS, config=config)


def test_a_grammar_holds_for_the_calls_of_an_agent(tmp_path: Path) -> None:
    reads = CODE.replace('"max_tokens": 2', '"max_tokens": 8').replace(
        "urllib.request.urlopen(", "answer = urllib.request.urlopen("
    )
    (tmp_path / "asks.py").write_text(reads.replace("return 1.0", """return float(b'"content":"yes"' in answer)"""))
    config = {"agent": {"run": f"{tmp_path / 'asks.py'}:ask"}, "rollout": {"grammar": {"regex": "yes"}}}
    assert toolwise.evaluate("builtin:small", TASKS, config=config, reward="agent")["score"] == 1.0
