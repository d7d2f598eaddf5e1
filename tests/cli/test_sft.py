"""`toolwise sft`: conversations in, a model out that reproduces them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUESTION, ANSWER = "What is the password?", "Answer: swordfish"


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sft")
    row = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    sizes = ("--steps", 25, "--lr", 3e-3, "--batch-tokens", 256, "--row-tokens", 128)
    ended = cli("sft", folder / "chats.jsonl", "--out", folder / "taught", *sizes)
    assert ended.status == 0, ended.err
    return folder / "taught", ended.out


def test_the_loss_falls_and_is_told(taught: tuple[Path, str]) -> None:
    folder, told = taught
    found = re.search(r"loss (\S+) → (\S+) over 25 steps", told)
    assert found is not None
    assert float(found[2]) < 0.2 * float(found[1])
    assert str(folder) in told


def test_the_length_of_the_replies_is_told(taught: tuple[Path, str]) -> None:
    folder, told = taught
    lengths = json.loads((folder / "summary.json").read_bytes())["reply_tokens"]
    assert 1 < lengths["median"] == lengths["p95"] == lengths["max"] < 20
    assert f"replies: {lengths['median']} tokens in the median" in told


def test_the_model_loads_and_says_what_it_was_taught(taught: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = taught
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    said = model.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True).strip() == ANSWER


def test_a_run_can_begin_with_it(
    taught: tuple[Path, str], tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    ended = cli("train", make_config(tmp_path), "--dry-run", "--set", f"model.path={taught[0]}")
    assert ended.status == 0, ended.err


def test_an_option_out_of_range_is_refused(tmp_path: Path, cli: Callable[..., Any]) -> None:
    ended = cli("sft", tmp_path / "chats.jsonl", "--out", tmp_path / "taught", "--steps", 0)
    assert ended.status == 2
    assert "--steps" in ended.err


# From a file, from flags, or both.

FILE = """\
name = "taught"
steps = 2
batch_tokens = 128
row_tokens = 128
deterministic = true

[data]
train = "chats.jsonl"
val_fraction = 0.25

[trainer]
console = false
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory beside a project folder with chats.jsonl and run.toml."""
    project = tmp_path / "project"
    project.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}]} for i in range(8)
    ]
    (project / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (project / "run.toml").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return project


def settings_of(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def test_a_file_says_it_all(desk: Path, cli: Callable[..., Any]) -> None:
    """Its paths are relative to it, and the default folder has its name."""
    ended = cli("sft", desk / "run.toml")
    assert ended.status == 0, ended.err
    [run] = Path("runs").iterdir()
    assert run.name.startswith("taught-")
    assert str(run) in ended.out
    assert "held-out conversations" in ended.out
    assert (run / "report.html").is_file()
    assert json.loads((run / "summary.json").read_text())["conversations"]["val"] == 2


def test_flags_and_overrides_precede_the_file(desk: Path, cli: Callable[..., Any]) -> None:
    flags = ("--lr", 0.5, "--batch-tokens", 64, "--set", "weight_decay=0.3", "--set", "batch_tokens=32")
    ended = cli("sft", desk / "run.toml", "--out", "out", *flags)
    assert ended.status == 0, ended.err
    found = settings_of(Path("out"))
    assert (found["lr"], found["weight_decay"], found["batch_tokens"], found["steps"]) == (0.5, 0.3, 32, 2)
    assert found["data"]["train"] == str(desk / "chats.jsonl")
    assert found["kind"] == "sft"


def test_a_model_and_its_data_by_name(desk: Path, cli: Callable[..., Any]) -> None:
    sizes = ("--steps", 1, "--batch-tokens", 64, "--lora-rank", 2, "--val", "project/chats.jsonl", "--dtype", "float32")
    ended = cli("sft", "builtin:small", "project/chats.jsonl", "--out", "out", *sizes)
    assert ended.status == 0, ended.err
    found = settings_of(Path("out"))
    assert (found["model"]["path"], found["model"]["dtype"], found["lora"]["rank"]) == ("builtin:small", "float32", 2)
    assert "loss" in ended.out


def test_a_run_is_resumed_by_its_folder(desk: Path, cli: Callable[..., Any]) -> None:
    assert cli("sft", desk / "run.toml", "--out", "out").status == 0
    ended = cli("resume", "out")
    assert (ended.status, ended.out.strip()) == (0, "nothing left to do: the run is at step 2 of 2")
    ended = cli("resume", "out", "--set", "steps=3")
    assert ended.status == 0, ended.err
    assert "over 3 steps" in ended.out
    ended = cli("sft", desk / "run.toml", "--out", "out", "--steps", 4, "--resume")
    assert ended.status == 0, ended.err
    assert "over 4 steps" in ended.out


def test_a_run_that_changed_no_weight_has_another_status(desk: Path, cli: Callable[..., Any]) -> None:
    ended = cli("sft", desk / "run.toml", "--out", "out", "--lr", 0)
    assert ended.status == 3
    assert "No weight of the model has changed in 2 steps: lr is 0" in ended.err


def test_conversations_that_are_too_long_are_told(desk: Path, cli: Callable[..., Any]) -> None:
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "word " * 300}]}
    with (desk / "chats.jsonl").open("a") as file:
        file.write(f"{json.dumps(row)}\n" * 20)
    ended = cli("sft", desk / "run.toml", "--out", "out")
    assert ended.status == 0, ended.err
    assert re.search(r"of 21 conversations were too long: 1\d truncated, 0 dropped", ended.out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run.toml", "--set", "stepz=3"), "unknown key `stepz` (did you mean `steps`?)"),
        (("run.toml", "--set", "data.vall=x"), "unknown key `data.vall` (did you mean `data.val`?)"),
        (("run.toml", "--set", "lr_schedule=cosin"), "did you mean 'cosine'?"),
        (("run.toml", "--set", "actor.lr=1"), "unknown key `actor`"),
        (("run.toml", "--set", "lr=fast"), "`lr` must be a valid number, got 'fast'"),
        (("missing.toml",), "missing.toml does not exist"),
        (("missing.jsonl",), "missing.jsonl: no such file"),
        (("no/such/model", "chats.jsonl"), "no/such/model"),
        (("builtin:small", "chats.jsonl", "more"), "got 3 names"),
        (("builtin:small", "chats.jsonl", "--model", "builtin:small"), "the model is named twice"),
        (("run.toml", "--resume"), "--resume needs --out DIR"),
        (("run.toml", "--out", "out", "--resume"), "holds no run to resume"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, desk: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    ended = cli("sft", *arguments)
    assert ended.status == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert not Path("out").exists()


def test_the_two_kinds_of_configuration_are_told_apart(
    desk: Path, tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    assert cli("sft", desk / "run.toml", "--out", "out").status == 0
    for command in (["train", "out/config.toml"], ["eval", "out"], ["export", "out", "--out", "exported"]):
        ended = cli(*command)
        assert ended.status == 2
        assert "is a configuration of `toolwise sft`" in ended.err
        assert "name its folder as model.path" in ended.err
    ended = cli("sft", make_config(tmp_path), "--out", "other")
    assert ended.status == 2
    assert "unknown key" in ended.err
