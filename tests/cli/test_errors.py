"""User errors: one line that says what is wrong, where and what to do, exit status 2, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selection import quick_first

Case = Callable[["Desk"], list[object]]
CASES: dict[str, tuple[Case, list[str]]] = {}


class Desk:
    """The folder and files of a test case."""

    def __init__(self, folder: Path, make_config: Callable[..., Path], run: Path) -> None:
        self.folder, self.make_config, self._run = folder, make_config, run

    def train(self, changes: dict[str, Any] | None = None, *more: object) -> list[object]:
        return ["train", self.make_config(self.folder, changes), "--out", self.folder / "out", *more]

    def file(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def rows(self, *rows: object) -> list[object]:
        """A run whose training data is `rows`."""
        arguments = self.train()
        self.file("train.jsonl", "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return arguments

    def model(self, *without: str) -> Path:
        """A copy of the small model that lacks files."""
        from toolwise.models import BUILTIN

        shutil.copytree(BUILTIN / "small", self.folder / "model", ignore=lambda _, names: set(without) & set(names))
        return self.folder / "model"

    def run(self) -> Path:
        """A copy of a finished run."""
        shutil.copytree(self._run, self.folder / "run")
        return self.folder / "run"

    def again(self, *more: object) -> list[object]:
        """Repeat the command that created the run, in the copy of its folder."""
        return ["train", self._run.parent / "run.toml", "--out", self.folder / "run", *more]


def case(*words: str) -> Callable[[Case], Case]:
    """An error case, and the words its message must contain."""

    def note(function: Case) -> Case:
        CASES[function.__name__] = function, list(words)
        return function

    return note


@case("bad.toml", "not valid TOML", "line 1")
def malformed_toml(desk: Desk) -> list[object]:
    return ["train", desk.file("bad.toml", "[data\ntrain = 3")]


@case("bad.yaml", "not valid YAML", "line 3")
def malformed_yaml(desk: Desk) -> list[object]:
    return ["train", desk.file("bad.yaml", "data:\n  train: [1, 2\n")]


@case("run.toml", "unknown key `trainer.total_step`", "did you mean `trainer.total_steps`?")
def unknown_key(desk: Desk) -> list[object]:
    return desk.train({"trainer": {"total_step": 3}})


@case("unknown key `trainr`", "did you mean `trainer`?")
def unknown_section(desk: Desk) -> list[object]:
    return desk.train(None, "--set", "trainr.total_steps=3")


@case("run.toml", "`data.batch_size` must be a valid integer", "got 'many'")
def wrong_type(desk: Desk) -> list[object]:
    return desk.train({"data": {"batch_size": "many"}})


@case("run.toml", "`rollout.n` must be greater than 0")
def out_of_range(desk: Desk) -> list[object]:
    return desk.train({"rollout": {"n": 0}})


@case("rollout.n is 1", "use 2 or more")
def nothing_to_compare(desk: Desk) -> list[object]:
    return desk.train({"rollout": {"n": 1}})


@case("override 'trainer.total_steps'", "section.key=value")
def override_without_a_value(desk: Desk) -> list[object]:
    return desk.train(None, "--set", "trainer.total_steps")


@case("override 'name.first=1'", "`name` is 'tiny', not a table")
def override_below_a_value(desk: Desk) -> list[object]:
    return desk.train(None, "--set", "name.first=1")


@case("nowhere.toml does not exist")
def missing_configuration(desk: Desk) -> list[object]:
    return ["train", desk.folder / "nowhere.toml"]


@case("is a folder", "give a configuration file")
def configuration_that_is_a_folder(desk: Desk) -> list[object]:
    return ["train", desk.folder]


@case("run.json", "must end in .toml, .yaml or .yml")
def configuration_of_another_kind(desk: Desk) -> list[object]:
    return ["train", desk.file("run.json", "{}")]


@case("gone.jsonl", "no such file", "check the path")
def missing_data(desk: Desk) -> list[object]:
    return desk.train({"data": {"train": "gone.jsonl"}})


@case("data.train is missing", "name a Parquet or JSONL file")
def data_not_named(desk: Desk) -> list[object]:
    return ["train", desk.file("run.toml", '[reward]\nfunction = "toolwise.demo.reward:small_world_reward"')]


@case("train.jsonl", "the file is empty", "at least one row")
def empty_data(desk: Desk) -> list[object]:
    return desk.rows()


@case("train.jsonl: row 1 (0-based; line 2)", "not JSON", "each line must be one JSON object")
def bad_json_line(desk: Desk) -> list[object]:
    return desk.rows({"prompt": "1?"}, '{"prompt": ')


@case("train.jsonl: row 1", "field prompt", "missing", 'data.columns = { prompt = "messages" }')
def row_without_prompt(desk: Desk) -> list[object]:
    return desk.rows({"prompt": "1?"}, {"messages": []})


@case("train.jsonl: row 0", "prompt[0].role", "'wizard'", "correct it")
def bad_role(desk: Desk) -> list[object]:
    return desk.rows({"prompt": [{"role": "wizard", "content": "1?"}]})


@case("train.jsonl: row 0", "tools_kwargs.search.create_kwarg", "did you mean create_kwargs?")
def wrong_tools_kwargs(desk: Desk) -> list[object]:
    return desk.rows({"prompt": "1?", "tools_kwargs": {"search": {"create_kwarg": {}}}})


@case("train.parquet", "not a Parquet file", "write the file again")
def parquet_that_is_none(desk: Desk) -> list[object]:
    desk.file("train.parquet", "prompt,answer\n1?,1\n")
    return desk.train({"data": {"train": "train.parquet"}})


@case("tools", "no tool 'calculater'", "did you mean 'calculator'?")
def unknown_tool(desk: Desk) -> list[object]:
    return desk.train({"tools": ["calculater"]})


@case("tools", "search has no option 'prise'", "did you mean 'price'?")
def unknown_option_of_a_tool(desk: Desk) -> list[object]:
    return desk.train({"tools": ["calculator", {"name": "search", "prise": 2}]})


@case("task", "train/0", "needs the tool 'search'", "the run's tools are: calculator", "add it to `tools`")
def task_that_wants_another_tool(desk: Desk) -> list[object]:
    return desk.train({"tools": ["calculator"]})


@case("reward.function is missing", "path/to/file.py:function")
def missing_reward(desk: Desk) -> list[object]:
    return desk.train({"reward": {"function": ""}})


@case("reward", "there is no module 'nowhere'", "write path/to/file.py:name")
def reward_in_no_module(desk: Desk) -> list[object]:
    return desk.train({"reward": {"function": "nowhere.rewards:judge"}})


@case("toolwise.demo.reward has no 'small_word_reward'", "did you mean 'small_world_reward'?")
def reward_misspelt(desk: Desk) -> list[object]:
    return desk.train({"reward": {"function": "toolwise.demo.reward:small_word_reward"}})


@case("reward", "judge.py", "SyntaxError", "line 2")
def reward_with_a_syntax_error(desk: Desk) -> list[object]:
    desk.file("judge.py", "def judge(messages, ground_truth):\n    return (1.0\n")
    return desk.train({"reward": {"function": "judge.py:judge"}})


@case("reward", "there is no file", "judge.py")
def reward_in_no_file(desk: Desk) -> list[object]:
    return desk.train({"reward": {"function": "judge.py:judge"}})


@case("judge", "takes no argument 'prise'", "add it to the function or remove it")
def reward_with_an_unknown_argument(desk: Desk) -> list[object]:
    desk.file("judge.py", "def judge(messages, ground_truth, price=1.0):\n    return 1.0\n")
    return desk.train({"reward": {"function": "judge.py:judge", "kwargs": {"prise": 2}}})


@case("model.path", "there is no folder", "gone", "builtin:small")
def missing_model(desk: Desk) -> list[object]:
    return desk.train({"model": {"path": str(desk.folder / "gone")}})


@case("no built-in model 'large'", "builtin:small")
def unknown_built_in_model(desk: Desk) -> list[object]:
    return desk.train({"model": {"path": "builtin:large"}})


@case("model has no config.json", "Hugging Face format")
def model_without_configuration(desk: Desk) -> list[object]:
    return desk.train({"model": {"path": str(desk.model("config.json"))}})


@case("config.json is not JSON", "damaged")
def model_with_a_broken_configuration(desk: Desk) -> list[object]:
    arguments = desk.train({"model": {"path": str(desk.model())}})
    desk.file("model/config.json", '{"model_type": ')
    return arguments


@case("model has no *.safetensors", "save_pretrained")
def model_without_weights(desk: Desk) -> list[object]:
    return desk.train({"model": {"path": str(desk.model("model.safetensors"))}})


@case("model has no tokenizer.json", "beside the model")
def model_without_tokenizer(desk: Desk) -> list[object]:
    return desk.train({"model": {"path": str(desk.model("tokenizer.json", "tokenizer_config.json"))}})


@case("model", "cannot be loaded", "safetensors", "damaged")
def model_cut_short(desk: Desk) -> list[object]:
    weights = desk.model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    return desk.train({"model": {"path": str(weights.parent)}})


@case("chat template", "add")
def model_without_chat_template(desk: Desk) -> list[object]:
    return desk.train({"model": {"path": str(desk.model("chat_template.jinja"))}})


@case("batch_size 9 is more than the 8 tasks", "lower batch_size or set drop_last to false")
def batch_larger_than_the_data(desk: Desk) -> list[object]:
    return desk.train({"data": {"batch_size": 9}})


@case("--resume needs --out DIR")
def resume_of_nothing(desk: Desk) -> list[object]:
    return ["train", desk.make_config(desk.folder), "--resume"]


@case("--resume needs --out DIR")
def resume_of_no_demo(desk: Desk) -> list[object]:
    return ["demo", "--resume"]


@case("run already holds a run", "add --resume", "another --out")
def folder_that_is_taken(desk: Desk) -> list[object]:
    desk.run()
    return desk.again()


@case("run already holds a run", "add --resume", "another --out")
def demo_in_a_folder_that_is_taken(desk: Desk) -> list[object]:
    return ["demo", "--out", desk.run()]


@case("afile is a file", "--out")
def folder_that_is_a_file(desk: Desk) -> list[object]:
    return ["train", desk.make_config(desk.folder), "--out", desk.file("afile", "")]


@case("cannot resume", "seed: 0 → 3, rollout.n: 2 → 4", "new --out", "toolwise resume")
def resume_of_another_run(desk: Desk) -> list[object]:
    desk.run()
    return desk.again("--resume", "--set", "seed=3", "--set", "rollout.n=4")


@case("holds no run to resume", "omit --resume")
def resume_in_an_empty_folder(desk: Desk) -> list[object]:
    (desk.folder / "empty").mkdir()
    return ["train", desk.make_config(desk.folder), "--out", desk.folder / "empty", "--resume"]


@case("nowhere holds no run to resume", "does not exist")
def resume_of_a_folder_that_is_not_there(desk: Desk) -> list[object]:
    return ["resume", desk.folder / "nowhere"]


@case("cannot resume", "config.toml is not valid TOML", "fix the file")
def resume_with_a_damaged_configuration(desk: Desk) -> list[object]:
    damage(desk.run() / "config.toml", at=0)
    return desk.again("--resume")


@case("has checkpoints but no config.toml", "another --out")
def resume_without_a_configuration(desk: Desk) -> list[object]:
    (desk.run() / "config.toml").unlink()
    return desk.again("--resume")


@case("cannot resume, all checkpoints are damaged", "model.safetensors", "remove")
def resume_when_all_is_damaged(desk: Desk) -> list[object]:
    for weights in desk.run().glob("checkpoints/*/model/model.safetensors"):
        damage(weights)
    return desk.again("--resume")


@case("metrics.jsonl, line 1", "not a JSON object", "remove that line")
def resume_with_damaged_metrics(desk: Desk) -> list[object]:
    damage(desk.run() / "metrics.jsonl", at=0)
    shutil.rmtree(desk.folder / "run" / "checkpoints" / "step-000002")  # so that there is work left
    return desk.again("--resume")


@case("step-000002", "model.safetensors", "is not what was saved", "toolwise eval")
def evaluation_of_a_tampered_run(desk: Desk) -> list[object]:
    damage(desk.run() / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    return ["eval", desk.folder / "run"]


@case("step-000001", "actor.safetensors", "is not what was saved", "use an earlier checkpoint")
def evaluation_of_a_tampered_checkpoint(desk: Desk) -> list[object]:
    found = desk.run() / "checkpoints" / "step-000001"
    damage(found / "actor.safetensors")
    return ["eval", found]


@case("has no config.toml", "not a run folder")
def evaluation_of_no_run(desk: Desk) -> list[object]:
    return ["eval", desk.folder]


@case("no complete checkpoint yet", "--model")
def evaluation_before_the_first_checkpoint(desk: Desk) -> list[object]:
    shutil.rmtree(desk.run() / "checkpoints")
    return ["eval", desk.folder / "run"]


@case("does not set data.val", "--data FILE")
def evaluation_on_nothing(desk: Desk) -> list[object]:
    return ["eval", desk.file("run.toml", '[data]\ntrain = "train.jsonl"')]


@case("chats.jsonl: row 0", "field messages", "one conversation per row")
def teaching_without_messages(desk: Desk) -> list[object]:
    return ["sft", desk.file("chats.jsonl", '{"text": "hello"}\n'), "--out", desk.folder / "out"]


@case("chats.jsonl: row 0", "messages[1].role")
def teaching_with_a_bad_role(desk: Desk) -> list[object]:
    row = {"messages": [{"role": "user", "content": "1?"}, {"role": "parrot", "content": "1"}]}
    return ["sft", desk.file("chats.jsonl", json.dumps(row)), "--out", desk.folder / "out"]


@case("not an empty folder", "choose another one")
def teaching_into_a_full_folder(desk: Desk) -> list[object]:
    return ["sft", desk.file("chats.jsonl", "{}"), "--out", desk.folder]


@case("tasks.csv", ".parquet, .jsonl, .json", "convert it")
def statistics_of_another_format(desk: Desk) -> list[object]:
    return ["data", "stats", desk.file("tasks.csv", "a,b\n")]


@case("rows.jsonl: row 0", "field question", "right dataset")
def preparing_another_dataset(desk: Desk) -> list[object]:
    source = desk.file("rows.jsonl", '{"prompt": "1?"}\n')
    return ["data", "prepare", "gsm8k", source, "--out", desk.folder / "out"]


@case("--oracle-tool applies to gsm8k only", "leave it out")
def preparing_with_the_wrong_option(desk: Desk) -> list[object]:
    return ["data", "prepare", "rlla", desk.file("rows.jsonl", "{}\n"), "--oracle-tool"]


@case("run.toml", "not valid TOML", "digits")
def a_number_of_5000_digits(desk: Desk) -> list[object]:
    return ["train", desk.file("run.toml", f"seed = {'9' * 5_000}\n")]


@case("run.toml", "`seed` is an integer of more than 64 bits")
def a_number_of_5000_hexadecimal_digits(desk: Desk) -> list[object]:
    return ["train", desk.file("run.toml", f"seed = 0x{'f' * 5_000}\n")]


@case("`seed`")
def an_override_of_5000_digits(desk: Desk) -> list[object]:
    return desk.train(None, "--set", f"seed={'9' * 5_000}")


@case("--tasks")
def an_option_of_5000_digits(desk: Desk) -> list[object]:
    return ["rollout", desk.make_config(desk.folder), "--tasks", "9" * 5_000]


@case("train.jsonl: row 0 (0-based; line 1)", "not JSON", "digits")
def a_row_of_5000_digits(desk: Desk) -> list[object]:
    return desk.rows('{"prompt": "1?", "ground_truth": ' + "9" * 5_000 + "}")


@case("train.jsonl: row 0", "field extra_info", "not JSON")
def a_field_of_5000_digits(desk: Desk) -> list[object]:
    return desk.rows({"prompt": "1?", "extra_info": '{"index": ' + "9" * 5_000 + "}"})


@case("File name too long")
def a_configuration_with_a_long_name(desk: Desk) -> list[object]:
    return ["train", desk.folder / f"{'x' * 300}.toml"]


@case("cannot be read (File name too long)")
def data_with_a_long_name(desk: Desk) -> list[object]:
    return desk.train({"data": {"train": f"{'x' * 300}.jsonl"}})


@case("is a pipe or a device")
def a_configuration_that_never_ends(desk: Desk) -> list[object]:
    (desk.folder / "run.toml").symlink_to("/dev/zero")
    return ["train", desk.folder / "run.toml"]


@case("is a pipe or a device")
def data_that_never_ends(desk: Desk) -> list[object]:
    (desk.folder / "tasks.jsonl").symlink_to("/dev/zero")
    return ["data", "stats", desk.folder / "tasks.jsonl"]


@case("is compressed with gzip")
def data_that_is_packed(desk: Desk) -> list[object]:
    return ["data", "stats", desk.file("tasks.jsonl", b"\x1f\x8b" + b"\0" * 20)]


@case("nested")
def a_configuration_that_is_deep(desk: Desk) -> list[object]:
    return ["train", desk.file("run.toml", f"[reward.kwargs]\nx = {'[' * 100}{']' * 100}\n")]


@case("No such option", "--help")
def an_option_that_is_none(desk: Desk) -> list[object]:
    return ["demo", "--sed", "3"]


def damage(file: Path, at: int = -1) -> None:
    """Change one byte of a file and keep its size."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(data)


@pytest.fixture
def desk(tmp_path: Path, make_config: Callable[..., Path], tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk", make_config, tiny_run)


def check(status: int, out: str, err: str, words: list[str]) -> None:
    assert status == 2, err
    assert err.startswith("toolwise: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in out + err
    assert [word for word in words if word not in err] == [], err


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_on_stderr_and_status_2(name: str, desk: Desk, cli: Callable[..., Any]) -> None:
    make, words = CASES[name]
    ended = cli(*make(desk))
    check(ended.status, ended.out, ended.err, words)
    assert not (desk.folder / "out").exists(), "nothing is begun before everything is checked"


@pytest.mark.parametrize(
    "name",
    quick_first(
        ["malformed_toml", "bad_json_line", "model_cut_short", "evaluation_of_a_tampered_run"],
        ("malformed_toml", "evaluation_of_a_tampered_run"),
    ),
)
def test_the_same_from_a_process_of_its_own(name: str, desk: Desk) -> None:
    make, words = CASES[name]
    arguments = [sys.executable, "-m", "toolwise", *map(str, make(desk))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=120)
    check(ended.returncode, ended.stdout, ended.stderr, words)


@pytest.mark.parametrize("name", ["unknown_key", "missing_data", "missing_model"])
def test_debug_shows_where_it_came_from(name: str, desk: Desk, cli: Callable[..., Any]) -> None:
    make, words = CASES[name]
    ended = cli("--debug", *make(desk))
    assert ended.status == 1
    assert "Traceback (most recent call last)" in ended.err
    assert [word for word in words if word not in ended.err] == []


def test_what_the_system_refuses_is_one_line_too(desk: Desk, cli: Callable[..., Any]) -> None:
    arguments = desk.train()
    ended = cli(*arguments[:-1], "/proc/nowhere/run")
    check(ended.status, ended.out, ended.err, ["cannot create /proc/nowhere/run", "another --out"])


def test_what_fails_on_the_way_is_one_line_too(desk: Desk, cli: Callable[..., Any]) -> None:
    arguments = desk.train()
    desk.file("out/rollouts", "not a folder")
    ended = cli(*arguments)
    check(ended.status, ended.out, ended.err, [str(desk.folder / "out" / "rollouts"), "File exists", "check the path"])


def test_a_wrong_option_is_told_with_its_usage(cli: Callable[..., Any]) -> None:
    ended = cli("demo", "--sed", "3")
    assert ended.status == 2
    assert "--sed" in ended.err
    assert "Traceback" not in ended.err
