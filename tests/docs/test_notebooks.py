"""A notebook from beginning to end: cells, a run, and the command line on the folder that it leaves."""

from __future__ import annotations

import json
import linecache
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.config.schema import load_config
from toolwise.errors import ConfigError, RewardError
from toolwise.rewards.function import Reward
from toolwise.tools import isolation

Cli = Callable[..., Any]

CELLS = [
    """
    import re
    import os
    import toolwise
    from toolwise import reward_function, tool

    NUMBER = re.compile(r"-?\\d+")
    SCALE = {"right": 1.0, "wrong": 0.25}
    """,
    """
    def numbers(text):
        return NUMBER.findall(text or "")
    """,
    """
    @reward_function
    async def grade(messages, ground_truth):
        last = numbers(messages[-1].content)
        score = SCALE["right" if str(ground_truth) in last else "wrong"]
        length = sum(len(m.content or "") for m in messages)  # replies differ, so that there is something to learn
        return {"score": score + length / 1000, "reason": f"pid {os.getpid()}"}

    @tool(price=0.5)
    def calculator(expression: str) -> str:
        '''Calculates.

        Args:
            expression: Such as 12 * 3.
        '''
        return f"{''.join(numbers(expression))} by {os.getpid()}"
    """,
    """
    rows = [{"prompt": f"What is {a} * {b}?", "ground_truth": a * b} for a, b in ((123, 45), (67, 89), (31, 271))]
    config = {
        "deterministic": True,
        "model": {"device": "cpu"},
        "data": {"batch_size": 2},
        "rollout": {"n": 2, "max_new_tokens": 24},
        "multi_turn": {"max_turns": 2},
        "trainer": {"total_steps": 2, "console": False},
    }
    """,
]


def run_cells(cells: list[str], space: dict[str, Any] | None = None) -> dict[str, Any]:
    """As IPython runs cells: compiled under a file name that is not there, their lines in the line cache."""
    space = {"__name__": "__main__"} if space is None else space
    for number, text in enumerate(map(textwrap.dedent, cells)):
        name = f"/tmp/ipykernel_0/{id(space)}-{number}-{hash(text)}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), space)
    return space


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return run_cells(CELLS)


@pytest.fixture(scope="module")
def run(notebook: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    result = toolwise.train(
        notebook["config"],
        tasks=notebook["rows"],
        val=notebook["rows"][:1],
        tools=[notebook["calculator"]],
        reward=notebook["grade"],
        out=folder / "run",
    )
    assert result.summary["steps"] == 2
    return Path((folder / "run").rename(folder / "moved"))  # nothing in it names its own place


def stored(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_cells_are_in_the_folder_and_named_relative_to_it(run: Path) -> None:
    config = load_config(run / "config.toml")
    assert config.tools == [f"{run.resolve()}/code/tool_calculator.py:calculator"]
    assert config.reward.function == f"{run.resolve()}/code/reward_grade.py:grade"
    text = (run / "config.toml").read_text(encoding="utf-8")
    assert '"code/tool_calculator.py:calculator"' in text
    assert 'train = "data/train.jsonl"' in text
    assert str(run.parent) not in text
    assert "toolwise-" not in text


def test_they_ran_in_other_processes(run: Path) -> None:
    found = stored(run)
    assert all(0.25 <= row["score"] < 2.0 for row in found)
    pids = {row["reason"] for row in found}
    assert pids
    assert f"pid {os.getpid()}" not in pids
    results = [m["content"] for row in found for m in row["messages"] if m["role"] == "tool" and " by " in m["content"]]
    assert results
    assert not any(text.endswith(f" by {os.getpid()}") for text in results)


def test_the_command_line_works_on_the_folder(run: Path, tmp_path: Path, cli: Cli) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    after = json.loads((run / "summary.json").read_bytes())["after"]
    ended = cli("eval", copy, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == after
    ended = cli("score", copy, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["changed"] == 0
    ended = cli("resume", copy, "--set", "trainer.total_steps=3")
    assert ended.status == 0, ended.err
    assert json.loads((copy / "summary.json").read_bytes())["steps"] == 3
    ended = cli("rollout", copy, "-n", 1, "--out", tmp_path / "rollouts")
    assert ended.status == 0, ended.err
    assert json.loads((tmp_path / "rollouts" / "rollouts.jsonl").read_text())["score"] >= 0.25
    ended = cli("export", copy, "--out", tmp_path / "model")
    assert ended.status == 0, ended.err


def test_it_goes_on_from_python_with_the_same_cells_and_not_with_others(
    run: Path, notebook: dict[str, Any], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    given = {"tasks": notebook["rows"], "val": notebook["rows"][:1], "tools": [notebook["calculator"]], "out": copy}
    code = (copy / "code" / "reward_grade.py").read_bytes()
    again = run_cells(CELLS)
    again["SCALE"]["wrong"] = 0.5
    with pytest.raises(ConfigError, match=r"the definition differs from .*reward_grade\.py"):
        toolwise.train(notebook["config"], **given, reward=again["grade"], resume=True)
    rows = [{**notebook["rows"][0], "ground_truth": 1}, *notebook["rows"][1:]]
    with pytest.raises(ConfigError, match=r"the data differs from .*train\.jsonl"):
        toolwise.train(notebook["config"], **{**given, "tasks": rows}, reward=notebook["grade"], resume=True)
    assert (copy / "code" / "reward_grade.py").read_bytes() == code
    result = toolwise.train(notebook["config"], **given, reward=notebook["grade"], resume=True)
    assert result.summary["steps"] == 2
    assert toolwise.resume(copy).summary["steps"] == 2


def test_a_model_is_evaluated_with_cells(run: Path, notebook: dict[str, Any]) -> None:
    figures = toolwise.evaluate(
        run / "checkpoints" / "step-000002" / "model",
        notebook["rows"][:1],
        config={name: value for name, value in notebook["config"].items() if name not in ("data", "trainer")},
        tools=[notebook["calculator"]],
        reward=notebook["grade"],
    )
    assert figures == json.loads((run / "summary.json").read_bytes())["after"]


def test_an_environment_of_a_cell(tmp_path: Path, notebook: dict[str, Any], cli: Cli) -> None:
    space = run_cells(
        [
            "START = 2\n",
            """
            class Counter:
                def __init__(self, start: int = START):
                    self.n = start

                def add(self, by: int) -> str:
                    '''Adds to the counter.

                    Args:
                        by: How much.
                    '''
                    self.n += by
                    return str(self.n)
            """,
        ]
    )
    config = {**notebook["config"], "trainer": {"total_steps": 1, "console": False}}
    rows = notebook["rows"]
    result = toolwise.train(
        config, tasks=rows, val=rows[:1], env=space["Counter"], reward=notebook["grade"], out=tmp_path / "run"
    )
    assert load_config(result.out / "config.toml").env.name.endswith("code/env_Counter.py:Counter")
    ended = cli("eval", result.out, "--json")
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("grade = lambda messages, ground_truth: 1.0", "is a lambda"),
        (
            "def make():\n    def grade(m, g): return 1.0\n    return grade\ngrade = make()",
            "is defined inside a function",
        ),
        ("log = iter([])\ndef grade(messages, ground_truth):\n    return len(log)", "grade uses log, a list_iterator"),
    ],
)
def test_a_reward_that_cannot_be_copied_says_why_and_what_to_do(
    cell: str, told: str, notebook: dict[str, Any], tmp_path: Path
) -> None:
    space = run_cells([cell])
    with pytest.raises(RewardError, match=told) as caught:
        toolwise.train(notebook["config"], tasks=notebook["rows"], reward=space["grade"], out=tmp_path / "run")
    assert 'or set reward.sandbox.tier = "off" to run it in this process' in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


PROMPT = """
import toolwise
def grade(messages, ground_truth):
    return 1.0

rows = [{"prompt": f"{n}?", "ground_truth": n} for n in range(4)]
small = {"data": {"batch_size": 4}, "rollout": {"n": 2, "max_new_tokens": 4}, "model": {"device": "cpu"}}
try:
    toolwise.train(small, tasks=rows, reward=grade, out="run", overrides=["trainer.total_steps=1"])
except toolwise.ToolwiseError as fault:
    print("told:", fault)

"""


def test_the_plain_prompt_works_or_says_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-q", "-i"],
        input=PROMPT,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=False,
    )
    if (tmp_path / "run").exists():  # it keeps what was typed: Python 3.13
        assert (tmp_path / "run" / "code" / "reward_grade.py").is_file()
    else:
        assert "told: reward grade: the sandbox loads a reward from its file" in done.stdout, done.stderr
        assert 'put it in a file, or set reward.sandbox.tier = "off"' in done.stdout


def test_an_async_tool_and_a_class_of_tools_come_back(tmp_path: Path) -> None:
    import asyncio

    from toolwise.tools.catalog import build_tools
    from toolwise.training.inputs import gather_inputs

    space = run_cells(
        [
            "from toolwise import tool\nfrom toolwise.tools.builtin.calculator import CalculatorTool\nLOUD = '!'\n",
            """
            @tool(name="echo", family="SEARCH")
            async def said(text: str) -> str:
                '''Says it again.

                Args:
                    text: What.
                '''
                return text + LOUD

            class Better(CalculatorTool):
                async def execute(self, instance_id, parameters, **kwargs):
                    return LOUD, None, {}
            """,
        ]
    )
    inputs = gather_inputs(toolwise.RunConfig(), tmp_path / "run", tools=[space["said"], space["Better"]])
    assert inputs.notes == []
    inputs.write()
    tools = build_tools(inputs.recorded.tools)
    assert list(tools) == ["echo", "calculator"]
    assert tools["echo"].family == "SEARCH"
    assert [asyncio.run(t.execute("i", {"text": "a"}))[0] for t in tools.values()] == ["a!", "!"]


def test_a_tool_that_cannot_be_copied_runs_in_this_process(
    notebook: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    from toolwise.tools.function import FunctionTool
    from toolwise.training.inputs import gather_inputs

    space = run_cells(["import os\nopened = iter([])\ndef where() -> int:\n    return os.getpid() or len(opened)\n"])
    inputs = gather_inputs(toolwise.RunConfig(), Path("unused"), tools=[space["where"]])
    assert inputs.recorded.tools == ["given in Python: the tool where"]
    assert "where uses opened, a list_iterator" in inputs.notes[0]
    assert not caplog.records
    text, _, _ = asyncio.run(FunctionTool(space["where"]).execute("i", {}))
    assert int(text) == os.getpid()
    assert "tool where runs in a thread" in caplog.text
    isolation.close()


def test_each_run_uses_the_tool_as_it_is_then(notebook: dict[str, Any], tmp_path: Path) -> None:
    """One tool object, evaluated, changed through a constant, then trained with: in processes both times."""
    space = run_cells(
        [
            "from toolwise import tool\nRATE = 2\n",
            """
            @tool(isolate=True)
            def calculator(expression: str) -> str:
                '''Calculates.

                Args:
                    expression: Such as 12 * 3.
                '''
                return f"RATE={RATE}"
            """,
        ]
    )
    given = {"tools": [space["calculator"]], "reward": notebook["grade"]}
    config = {**notebook["config"], "trainer": {"total_steps": 1, "console": False}}
    toolwise.evaluate("builtin:small", notebook["rows"], config=config, **given)
    space["RATE"] = 3
    run = toolwise.train(config, tasks=notebook["rows"], out=tmp_path / "run", **given).out
    told = {m["content"] for row in stored(run) for m in row["messages"] if m["role"] == "tool"}
    assert told == {"RATE=3"}
    assert "RATE = 3" in (run / "code" / "tool_calculator.py").read_text(encoding="utf-8")
    assert [path.stat().st_mode & 0o777 for path in (run / "code").glob("*.py")] == [0o600, 0o600]


def test_a_secret_given_to_a_reward_is_told_and_not_in_the_report(
    notebook: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = run_cells(
        ["def keyed(messages, ground_truth, api_key):\n    return len(messages[-1].content or '') / 100\n"]
    )
    reward = Reward.of(space["keyed"], {"api_key": "my-own-password"})
    config = {**notebook["config"], "trainer": {"total_steps": 1, "console": False}}
    run = toolwise.train(config, tasks=notebook["rows"], reward=reward, out=tmp_path / "run").out
    told = [record.getMessage() for record in caplog.records if "looks like a secret" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        f"reward.kwargs.api_key: looks like a secret and is stored as plain text in {tmp_path / 'run'}"
    )
    assert "my-own-password" not in told[0]
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "my-own-password" not in report
    assert "api_key = &#34;***&#34;" in report
