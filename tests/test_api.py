"""The Python API, also from inside a running event loop; writes no files outside the run folder."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import toolwise
from toolwise.api import new_run_folder, read_config, read_tasks
from toolwise.concurrency.deadlines import run_async
from toolwise.errors import ConfigError, DataError

ROWS = [{"prompt": f"What is {a} * {b}?", "ground_truth": str(a * b)} for a, b in ((123, 45), (67, 89), (31, 271))]
SMALL = {
    "deterministic": True,
    "model": {"device": "cpu"},
    "data": {"batch_size": 2},
    "rollout": {"n": 2, "max_new_tokens": 32},
    "multi_turn": {"max_turns": 2},
    "reward": {"sandbox": {"workers": 1}},
    "actor": {"lr": 1e-4},
    "trainer": {"total_steps": 1, "console": False},
}
asked: list[str] = []


@toolwise.tool(isolate=False)  # so that this process sees its calls
def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: Such as 12 * 3.
    """
    asked.append(expression)
    return "5535"


def right(messages: list[Any], ground_truth: Any) -> float:
    return float(str(ground_truth) in (messages[-1].content or ""))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("api") / "run"
    return toolwise.train(
        SMALL, model="builtin:small", tasks=ROWS, val=ROWS[:1], tools=[calculator], reward=right, out=out
    )


def test_a_run_comes_of_plain_functions_and_dictionaries(result: Any) -> None:
    assert result.summary["steps"] == 1
    assert result.summary["before"]["n"] == 1
    assert (result.out / "report.html").is_file()
    records = (result.out / "rollouts" / "step-000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(records) == 4
    assert {json.loads(line)["task_id"].split("/")[0] for line in records} == {"tasks"}


def test_the_function_is_a_tool_that_the_model_calls(result: Any) -> None:
    assert asked
    assert any("*" in expression for expression in asked)


def test_from_inside_a_running_loop(tmp_path: Path) -> None:
    async def notebook() -> Any:
        return toolwise.train(SMALL, tasks=ROWS[:2], reward=right, out=tmp_path / "run")

    found = asyncio.run(notebook())
    assert found.summary["steps"] == 1
    assert found.summary["before"] is None


def test_a_model_is_evaluated_on_rows(result: Any) -> None:
    config = {key: value for key, value in SMALL.items() if key != "trainer"}
    model = result.out / "checkpoints" / "step-000001" / "model"
    figures = toolwise.evaluate(model, ROWS[:1], config=config, tools=[calculator], reward=right)
    assert figures == result.summary["after"]


def test_the_command_line_finds_the_tools_the_reward_and_the_rows(result: Any, cli: Any) -> None:
    ended = cli("eval", result.out, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == result.summary["after"]
    ended = cli("score", result.out, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["changed"] == 0


def test_sft_trains_on_rows(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}]
    figures = toolwise.sft("builtin:small", rows, tmp_path / "taught", steps=3, lr=1e-3, row_tokens=64)
    assert figures["loss"] < figures["first_loss"]
    assert (tmp_path / "taught" / "model.safetensors").is_file()


def test_a_run_can_be_resumed_only_with_its_own_settings(result: Any) -> None:
    given: dict[str, Any] = {"tasks": ROWS, "val": ROWS[:1], "tools": [calculator], "reward": right, "out": result.out}
    with pytest.raises(ConfigError, match="already holds a run"):
        toolwise.train(SMALL, **given)
    with pytest.raises(ConfigError, match=r"rollout\.n: 2 → 3"):
        toolwise.train(SMALL, **given, resume=True, overrides=["rollout.n=3"])
    with pytest.raises(toolwise.ToolwiseError, match="the data differs"):
        toolwise.train(SMALL, **{**given, "tasks": ROWS[:2]}, resume=True)
    again = toolwise.train(SMALL, **given, resume=True, overrides=["trainer.total_steps=2"])
    assert again.summary["steps"] == 2


@pytest.mark.long
def test_an_object_that_cannot_be_named_is_asked_for_and_given_again(tmp_path: Path, cli: Any) -> None:
    def lookup(word: str) -> str:
        """Looks a word up.

        Args:
            word: Any.
        """
        return word

    out = tmp_path / "run"
    toolwise.train(SMALL, tasks=ROWS, tools=["calculator", lookup], reward=right, out=out)
    for command in (["resume", out, "--set", "trainer.total_steps=2"], ["rollout", out, "-n", 1]):
        ended = cli(*command)
        assert ended.status == 2
        assert ended.err.startswith("toolwise: tools: this run was started from Python with the tool lookup")
        assert ended.err.count("\n") == 1
    again = toolwise.resume(out, tools=["calculator", lookup], overrides=["trainer.total_steps=2"])
    assert again.summary["steps"] == 2
    with pytest.raises(ConfigError, match=r"tools.*calculator"):
        toolwise.resume(out, tools=[lookup])


def broken(messages: list[Any], ground_truth: Any) -> float:
    raise KeyError("gold")


@pytest.mark.long
def test_a_reward_that_fails_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(toolwise.ToolwiseError, match="reward broken failed on 4 of 4 rollouts") as caught:
        toolwise.train(SMALL, tasks=ROWS, reward=broken, out=tmp_path / "run")
    assert "KeyError: 'gold'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "in broken" in caught.value.__notes__[0]  # its traceback


@pytest.mark.parametrize(
    ("tasks", "error", "said"),
    [
        ([], ConfigError, "tasks is empty"),
        ([{"question": "1?"}], DataError, "tasks: row 0"),
        ([{"prompt": "1?", "task_id": "a"}, {"prompt": "2?", "task_id": "a"}], DataError, "already the id of row 0"),
        ("nowhere.jsonl", DataError, "nowhere.jsonl"),
    ],
)
def test_rows_are_checked_as_those_of_files_are(tasks: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_tasks(tasks, "tasks")


def test_tasks_and_rows_may_be_mixed() -> None:
    task = toolwise.Task(task_id="mine", prompt=[toolwise.Message(role="user", content="1?")])
    found = read_tasks([task, {"prompt": "2?"}], "tasks") or []
    assert [t.task_id for t in found] == ["mine", "tasks/row-1"]
    assert read_tasks(None, "val") is None


def test_a_configuration_may_be_a_file_a_mapping_an_object_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 4\n", encoding="utf-8")
    for given in (tmp_path / "run.toml", str(tmp_path / "run.toml"), {"seed": 4}, toolwise.RunConfig(seed=4)):
        assert (
            read_config(given, ["actor.lr=0.5"]).model_dump()
            == toolwise.RunConfig.model_validate({"seed": 4, "actor": {"lr": 0.5}}).model_dump()
        )
    assert read_config(None) == toolwise.RunConfig()


@pytest.mark.parametrize("name", ["builtin:small", "/models/my model", 'a"b', "10"])
def test_a_model_given_beside_takes_the_configuration_s_place(name: str) -> None:
    assert read_config({"model": {"path": "other"}}, (), name).model.path == name


def test_folders_are_named_after_the_run_and_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder("demo")
    assert folder.parent == Path("runs")
    assert folder.name.startswith("demo-2")


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolwise.api.datetime", Mock(now=lambda: datetime(2026, 1, 2, 3, 4, 5)))
    with ThreadPoolExecutor(8) as pool:
        names = sorted(folder.name for folder in pool.map(new_run_folder, ["demo"] * 8))
    first = "demo-20260102-030405"
    assert names == [first, *(f"{first}-{number}" for number in range(2, 9))]
    assert {folder.name for folder in Path("runs").iterdir()} == {*names}


def test_a_run_that_is_refused_leaves_no_empty_folder(tmp_path: Path) -> None:
    code = "from toolwise.api import new_run_folder as new; new('empty'); (new('used') / 'file').touch()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert [folder.name.split("-")[0] for folder in (tmp_path / "runs").iterdir()] == ["used"]


def test_a_file_in_the_place_of_the_folder_of_runs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(ConfigError, match="runs is a file: choose a folder with --out"):
        new_run_folder("demo")


async def fail() -> None:
    raise ValueError("inside")


async def fail_within() -> None:
    run_async(fail())


def test_what_is_raised_inside_comes_out_with_or_without_a_loop() -> None:
    with pytest.raises(ValueError, match="inside"):
        run_async(fail())
    with pytest.raises(ValueError, match="inside"):
        asyncio.run(fail_within())


def chatty(messages: list[Any], ground_truth: Any) -> bool:
    print("asked for", ground_truth)
    return str(ground_truth) in (messages[-1]["content"] or "")


def test_a_list_of_rewards_one_tool_alone_and_prints_in_the_folder(tmp_path: Path) -> None:
    found = toolwise.train(SMALL, tasks=ROWS, tools=calculator, reward=[right, (chatty, 0.5)], out=tmp_path / "run")
    records = [json.loads(line) for line in (found.out / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    assert {tuple(sorted(record["metrics"])) for record in records} == {("chatty", "right")}
    printed = (found.out / "logs" / "reward.log").read_text().splitlines()
    assert {line.partition("] ")[0] for line in printed} == {f"[step 0, {record['rollout_id']}" for record in records}
    assert all("asked for " in line for line in printed)


def test_a_model_object_is_rejected_with_a_hint_to_save_it(tmp_path: Path) -> None:
    import torch

    class Tokenizer:
        def save_pretrained(self, folder: str) -> None: ...

    for given in (torch.nn.Linear(1, 1), Tokenizer()):
        for work in (
            lambda given=given: toolwise.train(SMALL, model=given, tasks=ROWS, reward=right, out=tmp_path / "run"),
            lambda given=given: toolwise.evaluate(given, ROWS, reward=right),
            lambda given=given: toolwise.sft(given, [], tmp_path / "taught"),
        ):
            with pytest.raises(
                ConfigError, match=r'save_pretrained\("folder"\) first, then pass model="folder"'
            ) as caught:
                work()
            assert f"model is a {type(given).__name__} object" in str(caught.value)
    assert not (tmp_path / "run").exists()
