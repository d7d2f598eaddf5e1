"""`toolwise check env`: output, exit status, and handling of files and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from toolwise.cli.check import check_env
from toolwise.errors import ConfigError, DataError

app = typer.Typer()
app.command()(check_env)

GOOD = '''
class Counter:
    """Counts."""
    def __init__(self, goal: int = 3) -> None:
        self.n, self.goal = 0, goal
    def add(self, k: int) -> int:
        """Adds."""
        self.n += k
        return self.n
    @property
    def done(self) -> bool:
        return self.n >= self.goal
    def reward(self) -> float:
        return float(self.n == self.goal)
'''
BAD = """
import random
from toolwise import BaseEnv

class Dice(BaseEnv):
    async def reset(self): return str(random.random())
    async def step(self, action): return str(random.random()), 0.0, False, {}
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return f"{path}:Counter"


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(result.output)["findings"]}


def test_a_good_environment_is_a_table_and_status_0() -> None:
    result = run("gymnasium:FrozenLake-v1")
    assert result.exit_code == 0, result.output
    assert "determinism" in result.output
    assert result.output.endswith("no problems found\n")


def test_a_bad_one_is_status_1_and_says_what(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    result = run(f"{tmp_path / 'bad.py'}:Dice")
    assert result.exit_code == 1
    assert "runs with equal seed and actions differ at reset: observation" in result.output
    assert result.output.endswith("wrong: determinism; warning: invalid actions\n")


def test_as_json(good: str) -> None:
    result = run(good, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["env"] == good
    assert findings(result)["gold actions"]["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gold.json", '[{"name": "add", "arguments": {"k": 2}}, {"name": "add", "arguments": {"k": 1}}]', "ok"),
        ("gold.json", '[[{"name": "add", "arguments": {"k": 2}}, {"name": "add", "arguments": {"k": 1}}]]', "ok"),
        ("gold.jsonl", '{"name": "add", "arguments": {"k": 3}}\n\n', "ok"),
        ("gold.jsonl", '{"name": "add", "arguments": {"k": 1}}', "wrong"),
    ],
)
def test_gold_calls_from_a_file(good: str, tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    result = run(good, "--gold", tmp_path / name, "--gold-reward", 1, "--json")
    assert findings(result)["gold actions"]["verdict"] == expected
    assert result.exit_code == (expected == "wrong")


def test_gold_texts_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "gold.txt").write_text("down\ndown\nright\nright\ndown\nright\n")
    options = ["--kwargs", "make_kwargs.is_slippery=false", "--kwargs", 'actions=["left","down","right","up"]']
    result = run("gymnasium:FrozenLake-v1", *options, "--gold", tmp_path / "gold.txt", "--json")
    assert findings(result)["gold actions"]["says"] == "6 actions reach the goal, earning 1"


def test_a_task_and_tools(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "reward_model": {"ground_truth": truth}} for truth in ("1", "72")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "gold.txt").write_text("#### 72")
    common = ["gsm8k", "--data", tmp_path / "tasks.jsonl", "--gold", tmp_path / "gold.txt", "--json"]
    assert findings(run(*common, "--row", 1, "--tool", "calculator"))["gold actions"]["verdict"] == "ok"
    assert findings(run(*common, "--row", 0))["gold actions"]["verdict"] == "wrong"
    missing = run(*common, "--row", 2)
    assert isinstance(missing.exception, DataError)
    assert "has 2 rows, so there is no row 2" in str(missing.exception)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["gymnasium:Nowhere-v0"], ConfigError, "no environment 'Nowhere-v0'"),
        (["gsm8k", "--action", "[1, 2]"], ConfigError, "--action: [1, 2] is not an action"),
        (["gsm8k", "--action", '{"name": 3}'], ConfigError, "is not a tool call"),
        (["gsm8k", "--gold", "{folder}/none.json"], FileNotFoundError, "none.json"),
        (["gsm8k", "--gold", "{folder}/broken.json"], DataError, "broken.json is not valid JSON"),
        (["gsm8k", "--gold", "{folder}/empty.txt"], DataError, "empty.txt contains no actions"),
        (["gsm8k", "--gold", "{folder}/table.json"], DataError, "must contain a JSON list of actions"),
        (["gsm8k"], DataError, "task check has no ground truth"),
    ],
)
def test_what_cannot_be_checked_is_one_line(tmp_path: Path, arguments: list[str], error: Any, said: str) -> None:
    (tmp_path / "broken.json").write_text("[")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "table.json").write_text("{}")
    result = run(*(argument.replace("{folder}", str(tmp_path)) for argument in arguments))
    assert isinstance(result.exception, error)
    assert said in str(result.exception)
