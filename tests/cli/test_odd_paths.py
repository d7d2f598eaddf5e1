"""Every command that takes a path, given odd paths: one line and exit status 2, quickly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from selection import quick_first

Make = Callable[[Path, str], Path]
PATHS: dict[str, Make] = {}


def path(function: Make) -> Make:
    PATHS[function.__name__] = function
    return function


@path
def long_name(folder: Path, ending: str) -> Path:
    return folder / f"{'x' * 300}{ending}"


@path
def long_path(folder: Path, ending: str) -> Path:
    return folder / ("x/" * 3_000) / f"y{ending}"


@path
def loop(folder: Path, ending: str) -> Path:
    (folder / f"loop{ending}").symlink_to(f"loop{ending}")
    return folder / f"loop{ending}"


@path
def dangling(folder: Path, ending: str) -> Path:
    (folder / f"dangling{ending}").symlink_to("nowhere")
    return folder / f"dangling{ending}"


@path
def pipe(folder: Path, ending: str) -> Path:
    os.mkfifo(folder / f"pipe{ending}")
    return folder / f"pipe{ending}"


@path
def device(folder: Path, ending: str) -> Path:
    (folder / f"device{ending}").symlink_to("/dev/zero")
    return folder / f"device{ending}"


@path
def half_a_name(folder: Path, ending: str) -> Path:
    return folder / f"\udcff\n\x1b[2J{ending}"


@path
def below_a_file(folder: Path, ending: str) -> Path:
    (folder / "file").write_text("{}")
    return folder / "file" / f"below{ending}"


REWARD = "toolwise.demo.reward:small_world_reward"
COMMANDS: dict[str, tuple[str, Callable[[Path], list[object]]]] = {
    "train": (".toml", lambda odd: ["train", odd]),
    "train yaml": (".yaml", lambda odd: ["train", odd]),
    "resume": ("", lambda odd: ["resume", odd]),
    "eval": ("", lambda odd: ["eval", odd]),
    "rollout": (".toml", lambda odd: ["rollout", odd]),
    "run": ("", lambda odd: ["run", odd, "a question"]),
    "sft": (".jsonl", lambda odd: ["sft", odd, "--out", odd.parent / "out"]),
    "export": ("", lambda odd: ["export", odd, odd.parent / "out"]),
    "score": (".jsonl", lambda odd: ["score", odd, "--reward", REWARD]),
    "data stats": (".jsonl", lambda odd: ["data", "stats", odd]),
    "data stats parquet": (".parquet", lambda odd: ["data", "stats", odd]),
    "data prepare": (".jsonl", lambda odd: ["data", "prepare", "gsm8k", odd, "--out", odd.parent / "out"]),
    "data label": (".jsonl", lambda odd: ["data", "label", odd, "--heuristic"]),
    "check reward": (
        ".jsonl",
        lambda odd: ["check", "reward", REWARD, "--rollouts", odd],
    ),
    "check tool": (".py", lambda odd: ["check", "tool", f"{odd}:name"]),
    "check env": (".py", lambda odd: ["check", "env", f"{odd}:name"]),
}


class Late(BaseException):
    """No command may take this for an error of its own and report it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Late(f"it waited for {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", quick_first(PATHS, ("long_name", "loop", "pipe")))
def test_an_odd_path_is_one_line(
    command: str, kind: str, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ending, arguments = COMMANDS[command]
    odd = PATHS[kind](tmp_path, ending)
    with within(30):
        ended = cli(*arguments(odd))
    assert ended.status == 2, ended.err[-1500:]
    assert "Traceback" not in ended.err
    assert ended.err.startswith("toolwise: ")
    assert ended.err.count("\n") == 1, ended.err


OUTPUTS = ["long_name", "long_path", "loop", "pipe", "device", "below_a_file"]


@pytest.mark.parametrize("kind", quick_first(OUTPUTS, ("long_name", "loop")))
@pytest.mark.parametrize("command", ["train", "rollout", "sft", "data prepare"])
def test_an_odd_output_is_one_line(
    command: str, kind: str, tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    config = make_config(tmp_path)
    (tmp_path / "script.json").write_text('["Answer: 3"]')
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    odd = PATHS[kind](tmp_path, ".jsonl" if command == "data prepare" else "")
    scripted = ["--policy", "scripted", "--script", tmp_path / "script.json", "-n", 1]
    arguments: dict[str, list[object]] = {
        "train": ["train", config],
        "rollout": ["rollout", config, *scripted, "--set", "reward.function="],
        "sft": ["sft", tmp_path / "chats.jsonl"],
        "data prepare": ["data", "prepare", "gsm8k", tmp_path / "gsm8k.jsonl"],
    }
    with within(60):
        ended = cli(*arguments[command], "--out", odd)
    if command == "data prepare" and kind in ("pipe", "device", "loop"):
        return  # these are replaced by the file
    assert ended.status == 2, ended.err[-1500:]
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("toolwise: ")
