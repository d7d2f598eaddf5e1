"""A run's Python inputs are recorded so that the command line can load them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.config.imports import load_reference
from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import ConfigError
from toolwise.rewards.function import Reward
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.catalog import build_tools
from toolwise.tools.function import FunctionTool, tool
from toolwise.training.changes import portable_config
from toolwise.training.inputs import RunInputs, gather_inputs

Cli = Callable[..., Any]
HERE = Path(__file__).resolve()


def right(messages: list[Any], ground_truth: Any, weight: float = 1.0) -> float:
    return weight


def length(messages: list[Any], ground_truth: Any) -> float:
    return float(len(messages))


@tool(price=0.25)
def shout(text: str) -> str:
    """Shouts.

    Args:
        text: What.
    """
    return text.upper()


def whisper(text: str) -> str:
    """Whispers.

    Args:
        text: What.
    """
    return text.lower()


class Bell(BaseTool):
    def __init__(self, rings: int) -> None:
        super().__init__({}, FunctionTool(whisper, name="bell").tool_schema)
        self.rings = rings

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return await super().create(instance_id, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        return "dong", None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


def read_back(inputs: RunInputs) -> RunConfig:
    """What the command line sees: config.toml, written and read."""
    inputs.write()
    file = inputs.folder / "config.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(to_toml(portable_config(inputs.recorded, inputs.folder)), encoding="utf-8")
    return load_config(file)


@pytest.mark.parametrize(
    ("given", "name", "price"),
    [
        ("calculator", "calculator", None),
        (CalculatorTool({"price": 0.5}), "calculator", 0.5),
        (CalculatorTool, "calculator", None),
        ({"name": "calculator", "price": 2.0}, "calculator", 2.0),
        (shout, "shout", 0.25),
        (whisper, "whisper", None),
        (FunctionTool(whisper, price=0.75, description="Says it low."), "whisper", 0.75),
        ({"name": whisper, "price": 3.0}, "whisper", 3.0),
        ({"name": shout, "price": 4.0}, "shout", 4.0),
    ],
    ids=[
        *("name", "instance", "class", "table", "decorated", "function", "function-tool"),
        *("table-of-function", "table-of-decorated"),
    ],
)
def test_tools_come_back(given: Any, name: str, price: float | None, tmp_path: Path) -> None:
    inputs = gather_inputs(RunConfig(), tmp_path / "run", tools=[given])
    assert inputs.notes == []
    [again] = build_tools(read_back(inputs).tools).values()
    [used] = build_tools([given]).values()
    assert (again.name, again.tool_schema) == (name, used.tool_schema)
    assert again.price == used.price
    assert price is None or again.price == price


def test_a_function_is_named_by_its_file_and_one_of_a_package_by_its_module(tmp_path: Path) -> None:
    from toolwise.demo.reward import small_world_reward

    inputs = gather_inputs(RunConfig(), tmp_path, tools=[whisper], reward=small_world_reward)
    assert inputs.recorded.tools == [f"{HERE}:whisper"]
    assert inputs.recorded.reward.function == "toolwise.demo.reward:small_world_reward"
    assert load_reference(f"{HERE}:whisper", what="test").__name__ == "whisper"


def inside() -> Any:
    def hidden(text: str) -> str:
        """Hidden.

        Args:
            text: What.
        """
        return text

    return hidden


@pytest.mark.parametrize(
    ("given", "label", "reason"),
    [
        (Bell(3), "the tool bell", "it is a Bell object"),
        (inside(), "the tool hidden", "defined inside a function"),
        (FunctionTool(whisper, name="other"), "the tool other", "its name differs from the function's"),
        ({"name": "calculator", "price": object()}, "the tool", "not plain data"),
    ],
    ids=["object", "closure", "renamed", "options"],
)
def test_what_cannot_be_recorded_is_noted(given: Any, label: str, reason: str, tmp_path: Path) -> None:
    inputs = gather_inputs(RunConfig(), tmp_path / "run", tools=["calculator", given])
    [note] = inputs.notes
    assert note.startswith(label)
    assert reason in note
    tools = read_back(inputs).tools
    assert tools[0] == "calculator"
    with pytest.raises(ConfigError, match=f"tools: this run was started from Python with {label}.*resume it from"):
        build_tools(tools)


def test_a_reward_is_a_reference_with_its_arguments(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"reward": {"kwargs": {"weight": 2.0}}})
    for given, kwargs in ((right, {"weight": 2.0}), (Reward.of(right, {"weight": 3.0}), {"weight": 2.0})):
        reward = read_back(gather_inputs(config, tmp_path / "run", reward=given)).reward
        assert (reward.function, reward.kwargs, reward.parts) == (f"{HERE}:right", kwargs, [])
    reward = gather_inputs(RunConfig(), tmp_path, reward=Reward.of(right, {"weight": 3.0})).recorded.reward
    assert reward.kwargs == {"weight": 3.0}


def test_a_list_of_rewards_is_recorded_as_parts(tmp_path: Path) -> None:
    given = [right, "toolwise.demo.reward:small_world_reward", Reward.of(length)]
    reward = read_back(gather_inputs(RunConfig(), tmp_path / "run", reward=given)).reward
    assert [part.function for part in reward.parts] == [
        f"{HERE}:right",
        "toolwise.demo.reward:small_world_reward",
        f"{HERE}:length",
    ]
    assert reward.function == ""


def test_a_reward_that_runs_here_need_not_be_named(tmp_path: Path, cli: Cli) -> None:
    config = RunConfig.model_validate({"reward": {"sandbox": {"tier": "off"}}})
    inputs = gather_inputs(config, tmp_path / "run", reward=lambda messages, ground_truth: 1.0)
    assert read_back(inputs).reward.function == "given in Python: the reward <lambda>"
    (tmp_path / "run" / "rollouts").mkdir()
    (tmp_path / "run" / "rollouts" / "step-000001.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
    )
    for more in ([], ["--tier", "basic"]):
        ended = cli("score", tmp_path / "run", *more)
        assert ended.status == 2
        assert "reward: this run was started from Python with the reward <lambda>" in ended.err


def test_rows_become_a_file_and_a_file_stays_one(tmp_path: Path) -> None:
    from toolwise.api import read_tasks
    from toolwise.data import load_tasks

    rows = [{"prompt": "1?", "ground_truth": 1}, {"prompt": "2?", "ground_truth": None, "weight": 2}]
    tasks = read_tasks(rows, "tasks")
    config = RunConfig.model_validate({"data": {"limit": 1, "val": "other.jsonl", "val_limit": 3}})
    inputs = gather_inputs(config, tmp_path / "run", tasks=(rows, tasks), val=("held out.jsonl", tasks))
    data = read_back(inputs).data
    assert data.train == (tmp_path / "run" / "data" / "train.jsonl").resolve()
    assert load_tasks(data.train) == tasks
    assert (data.limit, data.val_limit, data.val) == (None, None, Path.cwd() / "held out.jsonl")


def test_rows_that_json_cannot_hold_are_not_recorded(tmp_path: Path) -> None:
    from toolwise.api import read_tasks

    rows = [{"prompt": "1?", "ground_truth": {1, 2}}]
    inputs = gather_inputs(RunConfig(), tmp_path / "run", tasks=(rows, read_tasks(rows, "tasks")))
    assert "data.train is not recorded: train: row 0 cannot be written as JSON" in inputs.notes[0]
    assert read_back(inputs).data.train is None


def test_discard_removes_only_what_was_written(tmp_path: Path) -> None:
    from toolwise.api import read_tasks

    rows = [{"prompt": "1?"}]
    inputs = gather_inputs(RunConfig(), tmp_path / "run", tasks=(rows, read_tasks(rows, "tasks")))
    inputs.write()
    assert (tmp_path / "run" / "data" / "train.jsonl").is_file()
    inputs.discard()
    assert not (tmp_path / "run").exists()
    inputs.write()
    (tmp_path / "run" / "mine.txt").touch()
    inputs.discard()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_an_environment_must_have_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="env: a Bell object cannot be loaded by name"):
        gather_inputs(RunConfig(), tmp_path, env=Bell(1))
    inputs = gather_inputs(RunConfig(), tmp_path, env=Bell)
    assert inputs.config.env.name == inputs.recorded.env.name == f"{HERE}:Bell"
    assert gather_inputs(RunConfig(), tmp_path, env="gsm8k").config.env.name == "gsm8k"


def test_a_module_s_function_that_is_no_longer_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = whisper
    monkeypatch.setattr(sys.modules[__name__], "whisper", length)
    inputs = gather_inputs(RunConfig(), tmp_path, tools=[function])
    assert "no longer has whisper" in inputs.notes[0]


@pytest.mark.parametrize("given", [dict, [dict], [int]])
def test_a_class_of_python_s_own_that_is_no_tool_is_one_line(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools: (dict|int): <class '\w+'> is not a tool: pass a BaseTool") as caught:
        toolwise.train(tasks=[{"prompt": "?"}], tools=given, reward=right, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_may_correct_the_parts_whose_errors_end_runs(tmp_path: Path) -> None:
    def inputs(name: str) -> RunInputs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"old")
        return RunInputs(tmp_path, RunConfig(), RunConfig(), {name: b"new"})

    for kind in ("estimator", "loss", "router"):
        inputs(f"code/{kind}_mine.py").check_files()
    for name in ("code/reward_mine.py", "data/train.jsonl"):
        with pytest.raises(ConfigError, match="cannot resume"):
            inputs(name).check_files()
