"""Everything a user can add from a file of their own: named in the configuration, or given to `toolwise.train`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from setting_keys import setting_keys

import toolwise
import toolwise.cli
import toolwise.view.report as report
from toolwise.config.imports import load_reference
from toolwise.config.loader import apply_overrides, build_config
from toolwise.config.schema import RunConfig, load_config
from toolwise.config.trainer import TrainerConfig
from toolwise.errors import ConfigError, FaultRateError, RouterError

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]

MINE = '''
import json
import toolwise


@toolwise.tool(price=0.5)
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


@toolwise.reward_function
def length(messages, ground_truth=None):
    return (sum(len(message.content or "") for message in messages) % 7) / 7


class Lines(toolwise.Tracker):
    def __init__(self, file):
        self.file = file

    def log(self, step, metrics):
        with open(self.file, "a") as file:
            file.write(f"{step} {len(metrics)}\\n")


class Counting(toolwise.Callback):
    def on_step(self, event):
        (event.run_folder / f"seen-{event.step}").touch()


class Tagged(toolwise.ToolCallParser):
    def parse(self, text):
        content, mark, call = text.partition("<tool_call>")
        if not mark:
            return f"{text} [read by mine]", []
        try:
            value = json.loads(call.partition("</tool_call>")[0])
            return content, [toolwise.ToolCall(id="call_0", name=value["name"], arguments=value["arguments"])]
        except (ValueError, KeyError, TypeError):
            return content, [toolwise.ToolCall(id="call_0", name="", arguments=call)]

    def render(self, content, calls):
        written = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
        return content + "".join(f"<tool_call>{text}</tool_call>" for text in written)


class Halves(toolwise.Router):
    """Half of a task's rollouts have no tools."""

    def __init__(self, tools, seed, bare=0.5):
        self.tools, self.seed, self.bare, self.seen = tuple(tools), seed, bare, 0

    def decide(self, tasks, n, step, *, label="step", explore=True):
        decisions = []
        for index, task in enumerate(tasks):
            prompt_id = f"{label}-{step}/{index}"
            bare = int(self.bare * n)
            for route, count, tools in (("BARE", bare, ()), ("ALL", n - bare, None)):
                if count:
                    decisions.append(
                        toolwise.RouteDecision(
                            task=task, group_id=f"{prompt_id}/{route}", prompt_id=prompt_id, n=count,
                            seed=self.seed + 1000 * step + index, prompt=task.prompt, tools=tools, route=route,
                        )
                    )
        return decisions

    def learn(self, scored):
        self.seen += len(scored)
        return {"router/seen": self.seen}

    def save(self, folder):
        (folder / "halves.txt").write_text(str(self.bare))

    def load(self, folder):
        self.bare = float((folder / "halves.txt").read_text())

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Room(toolwise.BaseEnv):
    """Ends after one step; longer texts are better."""

    async def reset(self):
        return "A room."

    async def step(self, action):
        return "Out.", (len(action) % 7) / 7, True, {}


def parse(text):
    return text, []


def raising(text):
    raise KeyError("no such mark")


def losing(text):
    return "", []


class Short(Halves):
    def decide(self, tasks, n, step, **more):
        return super().decide(tasks, n, step, **more)[:1]
'''
QUICK: dict[str, Any] = {
    "validation": {"before": False},
    "algorithm": {"zero_std_groups": "keep"},
    "rollout": {"n": 2, "max_new_tokens": 12},
}


def mine(folder: Path) -> Path:
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    return folder / "mine.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cli: Cli, make_config: MakeConfig) -> Path:
    """A run of two steps, from a configuration that names a user's file for each part."""
    folder = tmp_path_factory.mktemp("mine")
    mine(folder)
    patches = pytest.MonkeyPatch()
    for name in ("render_curves", "render_routing"):
        patches.setattr(report, name, lambda *_: b"")
    settings = QUICK | {
        "tools": ["calculator", "search", {"name": "mine.py:add", "price": 0.25}],
        "reward": {"function": "mine.py:length", "sandbox": {"tier": "off"}},
        "rollout": {"n": 4, "max_new_tokens": 12, "tool_parser": "mine.py:Tagged"},
        "router": {"name": "mine.py:Halves", "kwargs": {"bare": 0.5}},
        "trainer": {
            "total_steps": 2,
            "save_every": 1,
            "trackers": [{"name": "mine.py:Lines", "kwargs": {"file": str(folder / "lines.txt")}}],
            "callbacks": ["mine.py:Counting"],
        },
    }
    ended = cli("train", make_config(folder, settings), "--out", folder / "run")
    patches.undo()
    assert ended.status == 0, ended.err
    return folder


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def records(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_tool(folder: Path) -> None:
    tools = json.loads((folder / "run/checkpoints/step-000002/model/tools.json").read_text(encoding="utf-8"))
    assert "add" in json.dumps(tools)


def test_a_reward(folder: Path) -> None:
    assert {round(record["score"] * 7, 6) % 1 for record in records(folder / "run")} == {0}


def test_a_tracker_and_a_callback(folder: Path) -> None:
    assert [line.split()[0] for line in (folder / "lines.txt").read_text().splitlines()][:2] == ["1", "2"]
    assert (folder / "run" / "seen-2").exists()


def test_a_parser(folder: Path) -> None:
    texts = [m["content"] for record in records(folder / "run") for m in record["messages"] if m["role"] == "assistant"]
    assert any((text or "").endswith("[read by mine]") for text in texts)


def test_a_router(folder: Path) -> None:
    assert {record["route"] for record in records(folder / "run")} == {"BARE", "ALL"}
    assert [line["router/seen"] for line in metrics(folder / "run") if "router/seen" in line] == [8, 16]
    assert metrics(folder / "run")[0]["route/BARE/share"] == 0.5


def test_its_folder_works_on_the_command_line(folder: Path, cli: Cli, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "run", tmp_path / "run")
    assert load_config(run / "config.toml").router.name == f"{folder / 'mine.py'}:Halves"
    for arguments in (
        ("resume", run, "--set", "trainer.total_steps=3"),
        ("eval", run, "--json"),
        ("score", run),
        ("export", run, "--out", tmp_path / "exported"),
    ):
        ended = cli(*arguments)
        assert ended.status == 0, (arguments, ended.err)
    assert [line["router/seen"] for line in metrics(run) if "router/seen" in line] == [8, 16, 24]  # as if never stopped
    assert (tmp_path / "exported" / "halves.txt").read_text() == "0.5"


def test_an_environment_a_parser_and_a_router_in_python(tmp_path: Path, cli: Cli) -> None:
    file = mine(tmp_path)
    room, halves, parse = (load_reference(f"{file}:{name}", what="test") for name in ("Room", "Halves", "parse"))
    rows, router = [{"prompt": f"Go {way}."} for way in ("north", "south", "east", "west")], halves((), 3)
    settings = QUICK | {"deterministic": True, "data": {"batch_size": 2}, "rollout": {"n": 4, "max_new_tokens": 12}}
    settings |= {"reward": {"function": "env"}, "trainer": {"total_steps": 2, "console": False}}
    parts: dict[str, Any] = {"env": room, "router": router, "parser": parse}
    run = toolwise.train(settings, tasks=rows, val=rows, **parts, out=tmp_path / "run").out
    assert router.seen == 16
    assert {record["route"] for record in records(run)} == {"BARE", "ALL"}
    assert any(message["content"] == "Out." for message in records(run)[0]["messages"])
    recorded = load_config(run / "config.toml")
    assert recorded.env.name == f"{file}:Room"
    assert recorded.rollout.tool_parser == f"{file}:parse"
    ended = cli("eval", run)
    assert ended.status == 2
    assert "router.name: this run was started from Python with the router" in ended.err
    model = run / "checkpoints/step-000002/model"
    assert toolwise.evaluate(model, rows, config=recorded, router=router)["n"] == 4


@pytest.mark.parametrize("name", ["Room", "make_room"])
def test_an_environment_is_a_class_a_function_or_a_callable_object(name: str, tmp_path: Path) -> None:
    from functools import partial

    from toolwise.training.inputs import gather_inputs

    file = mine(tmp_path)
    file.write_text(MINE + "\n\ndef make_room(task):\n    return Room()\n", encoding="utf-8")
    source = load_reference(f"{file}:{name}", what="test")
    for given, recorded in ((source, f"{file}:{name}"), (f"{file}:{name}", f"{file}:{name}")):
        inputs = gather_inputs(RunConfig(), tmp_path / "run", env=given)
        assert (inputs.recorded.env.name, inputs.notes) == (recorded, [])
    inputs = gather_inputs(RunConfig(), tmp_path / "run", env=partial(source))
    assert inputs.recorded.env.name == "given in Python: the env partial"
    assert "commands on its folder cannot" in inputs.notes[0]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rollout": {"tool_parser": "mine.py:raising"}}, FaultRateError, "failed: KeyError: 'no such mark'"),
        ({"rollout": {"tool_parser": "mine.py:losing"}}, FaultRateError, "lost a reply"),
        ({"router": {"name": "mine.py:Short"}}, RouterError, "decisions for 1 prompts, but there are 2 tasks"),
        ({"router": {"name": "mine.py:Halves", "kwargs": {"bear": 1}}}, ConfigError, "no option 'bear'; did you mean"),
        ({"router": {"name": "mine.py:Room"}}, ConfigError, "is not a router: subclass toolwise.Router"),
        ({"rollout": {"tool_parser": "mine.py:Room"}}, ConfigError, "is not a parser: give a function"),
    ],
    ids=["parser-raises", "parser-loses", "router-decides-too-little", "option", "no-router", "no-parser"],
)
def test_faults_in_them_are_one_line(
    settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, make_config: MakeConfig
) -> None:
    mine(tmp_path)
    faults = {"faults": {"window": 1}, "trainer": {"total_steps": 1, "console": False}}
    rollout = {"rollout": {**QUICK["rollout"], **settings.pop("rollout", {})}}
    config = make_config(tmp_path, QUICK | faults | settings | rollout)
    with pytest.raises(error, match=message) as caught:
        toolwise.train(config, out=tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_command_is_a_function_and_one_line_in_the_table(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files: the command's module in toolwise/cli, and `_register` in toolwise/cli/__init__.py."""

    def hello(name: str, loud: bool = False) -> None:
        typer.echo(f"Hello, {name}{'!' * loud}")

    commands = toolwise.cli.app.registered_commands
    monkeypatch.setattr(toolwise.cli.app, "registered_commands", commands.copy())
    toolwise.cli.app.command("hello")(hello)
    assert cli("hello", "Ada", "--loud").out == "Hello, Ada!\n"
    assert "Missing argument" in cli("hello").err


def test_an_option_is_a_field_with_a_docstring() -> None:
    """Two files: the field in its section in toolwise/config, and its reader; docs/settings.md is generated."""

    class Trainer(TrainerConfig):
        patience: int = 3
        """Validations without progress before the run stops."""

    class Config(RunConfig):
        trainer: Trainer = Trainer()

    assert "trainer.patience" in setting_keys(Config)
    settings = apply_overrides({"trainer": {"patience": 4}}, ["trainer.patience=5"])
    assert build_config(Config, settings, source="run.toml").trainer.patience == 5
    with pytest.raises(ConfigError, match=r"unknown key `trainer.patiance` \(did you mean `trainer.patience`"):
        build_config(Config, {"trainer": {"patiance": 4}}, source="run.toml")
