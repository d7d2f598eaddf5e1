"""Supervised fine-tuning from files: the saved model and its run folder, and errors that name the bad row."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_cases import tiny_model
from small_world_teacher import conversations

import toolwise
from toolwise.config.sft import SftConfig
from toolwise.data.files import write_rows
from toolwise.errors import CheckpointError, ConfigError, DataError, MissingExtraError, ModelError, ToolwiseError
from toolwise.learner.supervised import SftLearner
from toolwise.models import load_chat, load_model
from toolwise.training import checkpoint
from toolwise.training.sft import SftTraining
from toolwise.training.sft_findings import MAX_NOT_FINITE, end_findings
from toolwise.training.sft_run import SftProgress
from toolwise.training.trackers.jsonl import read_metrics

torch.set_num_threads(1)
FEW: dict[str, Any] = {"steps": 2, "batch_tokens": 256, "row_tokens": 256}


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]}


TALKS = [talk(f"What is {i} + {i}?", f"Answer: {2 * i}") for i in range(12)]
SMALL: dict[str, Any] = {"steps": 6, "batch_tokens": 128, "row_tokens": 128, "lr": 1e-3, "deterministic": True}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Without times, and without the counts that only a run with observers has."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{n: v for n, v in line.items() if not n.startswith(("time/", "faults/"))} for line in lines]


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return summary


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random model with the tokenizer that ships, which `sft` starts from: ten times as fast as the whole one."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(vocab_size=2048, max_position_embeddings=512, pad_token_id=None).save_pretrained(folder)
    load_chat("builtin:small").tokenizer.save_pretrained(folder)
    MODEL.append(folder)
    yield folder
    MODEL.clear()


MODEL: list[Path] = []


def sft(data: Any, out: Path, *, model: Any = None, **settings: Any) -> dict[str, float]:
    return toolwise.sft(model or MODEL[0], data, out, **settings)


def test_a_trained_model_can_be_loaded_and_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    write_rows(conversations(6, seed=1), file)
    figures = sft(file, tmp_path / "out", **FEW)
    assert figures["first_loss"] > 0.0
    assert set(figures) == {"first_loss", "loss", "grad_norm", "tokens"}
    taught, chat = load_model(str(tmp_path / "out"), device="cpu")
    start, _ = load_model(str(MODEL[0]), device="cpu")
    pairs = list(zip(taught.parameters(), start.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all(torch.isfinite(a).all() for a, _ in pairs)
    assert chat.end_id


def test_two_conversations_are_learned(tmp_path: Path) -> None:
    talks = [talk("Who are you?", "Toolwise."), talk("And who am I?", "The reader.")]
    settings = {"steps": 40, "batch_tokens": 128, "row_tokens": 128, "lr": 1e-3}
    figures = sft(talks, tmp_path / "out", model="builtin:small", **settings)
    assert figures["loss"] < 0.2 * figures["first_loss"]


def test_settings_are_left_alone(tmp_path: Path) -> None:
    settings = {**FEW, "progress": False}
    sft([talk("a", "b")], tmp_path / "out", **settings)
    assert settings == {**FEW, "progress": False}


def test_parquet_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "talks.parquet"
    write_rows([talk("a", "b"), talk("c", "d", "e", "f")], file)
    assert sft(file, tmp_path / "out", **FEW)["tokens"] > 0


def test_a_folder_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        sft([talk("a", "b")], tmp_path / "out", **FEW)
    with pytest.raises(ConfigError, match="not an empty folder"):
        sft([talk("a", "b")], tmp_path / "out" / "mine.txt", **FEW)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step": 3}, "sft: unknown key `step` .did you mean `steps`"),
        ({"steps": 0}, "`steps` must be greater than 0, got 0"),
        ({"row_tokens": 0}, "`row_tokens` must be greater than or equal to 2, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sft([talk("a", "b")], tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_missing_conversations_are_reported_immediately(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no conversations"):
        sft([], tmp_path / "out", **FEW)


def test_rows_may_come_from_a_generator(tmp_path: Path) -> None:
    sft((row for row in TALKS), tmp_path / "out", **FEW, val=iter(TALKS[:2]))
    assert summary_of(tmp_path / "out")["conversations"]["train"] == len(TALKS)
    assert len((tmp_path / "out" / "data" / "train.jsonl").read_text().splitlines()) == len(TALKS)
    with pytest.raises(DataError, match=r"data: row 0 .*the row is a str, not a dict"):
        sft(["hello"], tmp_path / "other", **FEW)
    with pytest.raises(ConfigError, match="data: expected a file or a list of rows, got a dict"):
        sft(talk("a", "b"), tmp_path / "other", **FEW)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "field messages: expected a list"),
        ({"messages": []}, "field messages: expected a list"),
        ({"messages": "hello"}, "field messages: expected a list"),
        ({"messages": ["hello"]}, r"field messages\[0\]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]}, r"field messages\[1\]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, r"field messages\[1\]\.content"),
        ({"messages": [{"role": "user", "content": "only a question"}]}, "field messages: .*no assistant message"),
        ({"prompt": None, "response": None}, r"field messages\[0\]\.content"),
        (talk("a", "b") | {"tools": ["calculator"]}, "field tools"),
        (talk("a", "b") | {"tools": "calculator"}, "field tools"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(f"{json.dumps(talk('a', 'b'))}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"talks\.jsonl: row 1 .*{said}") as caught:
        sft(file, tmp_path / "out", **FEW)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_adapters_without_peft_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'toolwise\[peft\]'"):
        sft([talk("a", "b")], tmp_path / "out", **{**FEW, "lora_rank": 4})
    assert not (tmp_path / "out").exists()


def test_adapters_are_trained_and_merged_into_a_plain_model(tmp_path: Path) -> None:
    settings = {"steps": 40, "batch_tokens": 128, "row_tokens": 128, "lr": 1e-2, "lora_rank": 8}
    figures = sft([talk("Who are you?", "Toolwise.")], tmp_path / "out", **settings)
    assert figures["loss"] < 0.5 * figures["first_loss"]
    taught, _ = load_model(str(tmp_path / "out"), device="cpu")
    start, _ = load_model(str(MODEL[0]), device="cpu")
    moved = {
        n for (n, a), b in zip(taught.named_parameters(), start.parameters(), strict=True) if not torch.equal(a, b)
    }
    assert moved
    assert not any("embed" in name or "norm" in name or "lora" in name for name in moved)


def test_errors_of_adapters_name_the_settings_of_sft(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^lora\.rank is 999, .* out of lora\.target_modules"):
        sft([talk("a", "b")], tmp_path / "out", **FEW, lora_rank=999)
    with pytest.raises(ConfigError, match=r"^lora\.target_modules: the model has no layer 'nope'"):
        sft([talk("a", "b")], tmp_path / "out", **FEW, lora={"rank": 2, "target_modules": ["nope"]})


def test_a_rank_below_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`lora\.rank` must be greater than or equal to 0, got -1"):
        sft([talk("a", "b")], tmp_path / "out", **{**FEW, "lora_rank": -1})


# The run folder.


def test_the_folder_is_a_run_and_a_model(tmp_path: Path) -> None:
    sft(TALKS, tmp_path / "out", **FEW, val_fraction=0.25)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *("config.toml", "metrics.jsonl", "summary.json", "report.html", "report.png", "checkpoints", "data"),
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    summary = summary_of(out)
    assert (summary["kind"], summary["steps"], summary["interrupted"], summary["updated"]) == ("sft", 2, False, True)
    assert summary["conversations"]["train"] == 9
    assert summary["conversations"]["val"] == 3
    assert summary["before"]["loss"] > 0
    steps = [line for line in metrics_of(out) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert {"loss", "entropy", "grad_norm", "update_norm", "lr", "tokens", "all_tokens", "epoch"} <= steps[0].keys()
    assert [line["step"] for line in metrics_of(out) if "eval/loss" in line] == [0, 2]
    report = (out / "report.html").read_text()
    assert "held-out conversations" in report
    assert f"{summary['before']['loss']:.3f}" in report


def test_the_loss_is_the_mean_over_assistant_tokens_of_the_step(tmp_path: Path) -> None:
    from toolwise.learner.conversations import tokenize_conversation
    from toolwise.messages import Message

    figures = sft(TALKS, tmp_path / "out", **{**FEW, "batch_tokens": 4096, "steps": 1})
    model, chat = load_model(str(MODEL[0]), device="cpu")
    rows = [r for t in TALKS for r in tokenize_conversation(chat, [Message.model_validate(m) for m in t["messages"]])]
    assert figures["tokens"] == sum(row.targets for row in rows)
    assert (
        figures["first_loss"] == figures["loss"] == pytest.approx(SftLearner(model, SftConfig()).loss(rows), rel=1e-5)
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of six steps, with a validation every two."""
    out = tmp_path_factory.mktemp("straight") / "run"
    sft(TALKS, out, **SMALL, val_fraction=0.25, val_every=2)
    return out


class StopAfter(toolwise.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: toolwise.StepEvent) -> toolwise.Stop | None:
        return toolwise.Stop("that is enough") if event.step == self.step else None


@pytest.mark.parametrize("step", [1, 4])
def test_a_run_that_was_stopped_resumes_to_the_last_digit(straight: Path, tmp_path: Path, step: int) -> None:
    out = tmp_path / "run"
    sft(TALKS, out, **SMALL, val_fraction=0.25, val_every=2, callbacks=StopAfter(step))
    stopped = summary_of(out)
    assert (stopped["interrupted"], stopped["steps"]) == (True, step)
    assert "that is enough" in stopped["stopped"]
    assert not (out / "model.safetensors").exists()
    moved = tmp_path / "moved"
    shutil.move(out, moved)  # its data is inside
    result = toolwise.resume(moved)
    assert result.summary["steps"] == 6
    assert metrics_of(moved) == metrics_of(straight)
    ours, theirs = weights_of(moved), weights_of(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_was_killed_resumes_from_its_last_checkpoint(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after the checkpoint are done again, and their metrics replaced."""
    out = tmp_path / "run"
    updates = SftLearner.update

    def killed(learner: SftLearner, batch: Any) -> Any:
        if learner.version == 5:
            raise KeyboardInterrupt
        return updates(learner, batch)

    settings = {**SMALL, "val_fraction": 0.25, "val_every": 2, "save_every": 3}
    with monkeypatch.context() as patch:
        patch.setattr(SftLearner, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            sft(TALKS, out, **settings)
    assert not (out / "summary.json").exists()
    assert max(line["step"] for line in metrics_of(out)) == 5
    toolwise.resume(out)
    assert metrics_of(out) == metrics_of(straight)


def test_adapters_resume_to_the_last_digit(tmp_path: Path) -> None:
    settings = {**SMALL, "lora_rank": 4, "lr": 1e-2}
    sft(TALKS, tmp_path / "one", **settings)
    sft(TALKS, tmp_path / "two", **settings, callbacks=StopAfter(3))
    toolwise.resume(tmp_path / "two")
    assert metrics_of(tmp_path / "two") == metrics_of(tmp_path / "one")
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any("lora" in name for name in one)


def test_a_finished_run_has_nothing_left_and_can_be_extended(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert toolwise.resume(out).note == "nothing left to do: the run is at step 6 of 6"
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    result = toolwise.resume(out, overrides=["steps=8"])
    assert (result.summary["steps"], result.note) == (8, "")
    assert result.summary["changes"] == [{"step": 6, "key": "steps", "old": 6, "new": 8}]


def test_a_run_resumes_only_with_its_own_settings_and_data(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    with pytest.raises(
        ConfigError, match=r"already holds a run: add --resume \(resume=True\) .* another --out \(out=\)"
    ):
        sft(TALKS, out, **SMALL)
    with pytest.raises(ConfigError, match="batch_tokens: 128 → 64"):
        toolwise.resume(out, overrides=["batch_tokens=64"])
    with pytest.raises(ConfigError, match="the data differs from"):
        sft(TALKS[:-1], out, **SMALL, val_fraction=0.25, val_every=2, resume=True)


def test_a_run_is_not_resumed_with_a_changed_data_file(tmp_path: Path) -> None:
    file, out = tmp_path / "talks.jsonl", tmp_path / "out"
    write_rows(TALKS, file)
    sft(file, out, **FEW, val_fraction=0.3)
    before = (out / "config.toml").read_bytes()
    write_rows([*TALKS[1:], TALKS[0]], file)
    with pytest.raises(CheckpointError, match=r"made with other data.*restore the file, or start a new run"):
        toolwise.resume(out, overrides=["steps=3"])
    assert (out / "config.toml").read_bytes() == before
    write_rows(TALKS, file)
    assert toolwise.resume(out, overrides=["steps=3"]).summary["steps"] == 3


def test_progress_of_earlier_versions_has_no_fingerprint() -> None:
    progress = SftProgress(fingerprint="now")
    progress.load_state_dict({"step": 3})
    assert (progress.step, progress.fingerprint) == (3, "now")


def test_the_best_model_is_saved_if_asked_for(tmp_path: Path) -> None:
    """Learning one half by heart makes the other half worse in the end."""
    losses = {}
    for keep in (False, True):
        out = tmp_path / str(keep)
        settings = {**SMALL, "steps": 24, "lr": 2e-2, "warmup": 0.0}
        losses[keep] = sft(TALKS[:4], out, val=TALKS[6:8], val_every=4, keep_best=keep, **settings)
    best = summary_of(tmp_path / "True")["best"]
    assert best["step"] < 24
    assert losses[True]["val_loss"] == losses[False]["val_loss"] > best["loss"]
    saved = checkpoint.best(tmp_path / "True" / "checkpoints", "-loss")
    assert saved is not None
    assert saved.step == best["step"]
    kept, of_best = weights_of(tmp_path / "True"), weights_of(saved.path / "model")
    last = weights_of(tmp_path / "False")
    assert all(torch.equal(kept[name], of_best[name]) for name in kept)
    assert any(not torch.equal(kept[name], last[name]) for name in kept)


def test_epochs_give_the_number_of_steps(tmp_path: Path) -> None:
    sft(TALKS, tmp_path / "out", epochs=1.5, batch_tokens=128, row_tokens=128)
    summary = summary_of(tmp_path / "out")
    assert summary["total_steps"] == summary["steps"]
    assert summary["epochs"] == pytest.approx(1.5, abs=0.5)


def test_steps_replace_the_epochs_of_a_resumed_run(tmp_path: Path) -> None:
    sft(TALKS, tmp_path / "out", epochs=1, batch_tokens=128, row_tokens=128)
    done = summary_of(tmp_path / "out")["steps"]
    result = toolwise.resume(tmp_path / "out", overrides=[f"steps={done + 2}"])
    assert result.summary["steps"] == done + 2
    assert toolwise.resume(tmp_path / "out").note.startswith("nothing left to do")


def test_trackers_and_callbacks_follow_the_run(tmp_path: Path) -> None:
    logged: list[tuple[int, set[str]]] = []

    class Log(toolwise.Tracker):
        def log(self, step: int, metrics: Any) -> None:
            logged.append((step, set(metrics)))

    class Broken(toolwise.Callback):
        def on_step(self, event: toolwise.StepEvent) -> None:
            raise RuntimeError("oops")

    sft(TALKS, tmp_path / "out", **FEW, trackers=[Log()], callbacks=[Broken()])
    assert [step for step, names in logged if "loss" in names] == [1, 2]
    [broken] = [entry for entry in summary_of(tmp_path / "out")["observers"] if entry["errors"]]
    assert "oops" in broken["first_error"]


def test_a_run_in_use_is_not_entered(tmp_path: Path) -> None:
    sft(TALKS, tmp_path / "out", **FEW)
    with checkpoint.FolderLock(tmp_path / "out"), pytest.raises(ToolwiseError, match="in use by process"):
        toolwise.resume(tmp_path / "out", overrides=["steps=3"])


# Runs that learn nothing say so.


def findings_of(out: Path) -> list[str]:
    return [finding["kind"] for finding in summary_of(out)["diagnosis"]]


def test_a_rate_of_zero_changes_no_weight_and_is_told(tmp_path: Path) -> None:
    sft(TALKS, tmp_path / "out", **{**FEW, "lr": 0.0})
    assert findings_of(tmp_path / "out") == ["weights_unchanged"]
    assert summary_of(tmp_path / "out")["updated"] is False


def test_losses_that_do_not_fall_are_told(tmp_path: Path) -> None:
    sft(TALKS, tmp_path / "out", **{**SMALL, "steps": 20, "lr": 3.0}, val_fraction=0.25)
    assert "validation_not_falling" in findings_of(tmp_path / "out")


def test_a_short_run_that_made_the_model_worse_says_so_and_which_model_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    sft(TALKS, out, **{**SMALL, "steps": 4, "lr": 3.0, "warmup": 0.0}, val_fraction=0.25, val_every=1, keep_best=True)
    summary = summary_of(out)
    assert summary["before"]["loss"] < summary["best"]["loss"]
    [finding] = [entry for entry in summary["diagnosis"] if entry["kind"] == "validation_not_falling"]
    kept = f"the saved model is the best trained one, of step {summary['best']['step']}"
    assert kept in str(finding)
    assert kept in caplog.text
    assert kept in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("losses", "progress", "kinds"),
    [
        ([2.0] * 20 + [1.0] * 20, {}, []),
        ([1.0] * 20 + [2.0] * 20, {}, ["loss_not_falling"]),
        ([1.0] * 5 + [2.0] * 5, {"step": 10}, []),
        ([2.0] * 20 + [1.0] * 20, {"before": 1.0, "validation": 1.5, "best": 0.5}, ["validation_not_falling"]),
        ([2.0] * 20 + [1.0] * 20, {"before": 1.0, "validation": 0.9, "best": 0.5}, []),
        ([2.0, 1.0], {"step": 2, "before": 1.0, "validation": 1.5, "best": 1.2}, ["validation_not_falling"]),
        ([2.0, 1.0], {"step": 2, "before": 1.0, "validation": math.nan}, ["validation_not_falling"]),
        ([2.0, 1.0], {"step": 2, "before": 1.0, "validation": 1.5, "best": 0.9}, []),
        ([2.0, 1.0], {"step": 2, "before": math.nan, "validation": 1.5, "best": 1.5}, []),
        ([2.0] * 20 + [1.0] * 18, {"not_finite": 2}, ["losses_not_finite"]),
        ([1.0] * 40, {"updated": False}, ["weights_unchanged"]),
    ],
)
def test_findings_at_the_end(losses: list[float], progress: dict[str, Any], kinds: list[str]) -> None:
    state = SftProgress(**{"step": 40, "updated": True, **progress})
    run: Any = SimpleNamespace(progress=state, config=SftConfig())
    found = end_findings(run, losses)
    assert [finding.name for finding in found] == kinds
    assert all(finding.says and finding.cure for finding in found)


def test_losses_that_are_not_numbers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SftLearner._forward

    def overflow(learner: SftLearner, trunk: Any, part: Any) -> Any:
        logprobs, entropy = forward(learner, trunk, part)
        return logprobs * math.nan if learner.version else logprobs, entropy

    monkeypatch.setattr(SftLearner, "_forward", overflow)
    figures = sft(TALKS, tmp_path / "out", **{**FEW, "steps": 3})
    assert math.isnan(figures["loss"])
    assert findings_of(tmp_path / "out") == ["loss_not_finite", "losses_not_finite"]
    with pytest.raises(ToolwiseError, match=f"not a finite number in the last {MAX_NOT_FINITE} steps"):
        sft(TALKS, tmp_path / "longer", **{**FEW, "steps": 30})


# Bad inputs.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_best": True}, "trainer.keep_best needs held-out conversations"),
        ({"val_every": 5}, "val_every needs held-out conversations"),
        ({"val_fraction": 0.5, "val": TALKS}, "keep one"),
        ({"val_fraction": 1.0}, "`data.val_fraction` must be less than 1"),
        ({"val": []}, "val: there are no conversations"),
        ({"dtype": "bfloat16", "device": "cpu"}, "bfloat16 on a CPU"),
        ({"lora_rnk": 3}, "unknown key `lora_rnk`"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_together_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolwiseError, match=said) as caught:
        sft(TALKS, tmp_path / "out", **FEW, **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_context_that_is_too_short_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model's context is 512: set it to 512 or less"):
        sft([talk("word " * 300, "b")], tmp_path / "out", **{**FEW, "row_tokens": 9000})


def test_conversations_that_are_too_long_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*TALKS, talk("Say much.", "word " * 200), talk("word " * 200, "b")]
    for too_long, counts in (("truncate", (1, 1)), ("drop", (0, 2))):
        caplog.clear()
        sft(rows, tmp_path / too_long, **{**FEW, "row_tokens": 64}, too_long=too_long)
        found = summary_of(tmp_path / too_long)["conversations"]
        assert (found["train"], found["truncated"], found["dropped"]) == (14, *counts)
        assert "2 of 14 conversations have more than row_tokens = 64 tokens" in caplog.text


def test_interrupted_by_a_signal_it_saves_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    record = SftTraining._record_step

    def interrupt(training: SftTraining, step: int, *rest: Any) -> None:
        record(training, step, *rest)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SftTraining, "_record_step", interrupt)
    sft(TALKS, tmp_path / "out", **SMALL)
    summary = summary_of(tmp_path / "out")
    assert (summary["interrupted"], summary["stopped"], summary["steps"]) == (True, None, 2)
    saved = checkpoint.latest(tmp_path / "out" / "checkpoints")
    assert saved is not None
    assert saved.step == 2


# A full disk.


def refuse(path: Path, *_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "without"])
def test_a_disk_that_is_full_after_the_model_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    def refuse_checkpoint(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is full")

    if not saved:
        monkeypatch.setattr("toolwise.training.sft.checkpoint.save", refuse_checkpoint)
    monkeypatch.setattr("toolwise.training.trackers.reporter.write_atomic", refuse)
    with pytest.raises(ModelError, match=r"No space left.*the trained model there is complete"):
        sft(TALKS, tmp_path / "out", **FEW)
    monkeypatch.undo()
    assert (tmp_path / "out" / "config.toml").is_file()
    assert load_model(str(tmp_path / "out"), device="cpu")[1].end_id


def test_a_disk_that_is_full_before_the_model_leaves_only_what_others_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note_then_refuse(learner: SftLearner, folder: Path) -> None:
        (tmp_path / "out" / "notes.txt").write_text("not the run's")
        refuse(folder)

    monkeypatch.setattr(SftLearner, "save_model", note_then_refuse)
    with pytest.raises(ModelError, match="partial files were removed"):
        sft(TALKS, tmp_path / "out", **FEW)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    monkeypatch.setattr(SftLearner, "save_model", lambda _, folder: refuse(folder))
    with pytest.raises(ModelError, match="partial files were removed"):
        sft(TALKS, tmp_path / "new", **FEW)
    assert not (tmp_path / "new").exists()


def test_an_earlier_model_survives_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    sft(TALKS, out, **FEW)
    shutil.rmtree(out / "checkpoints")
    names = {path.name for path in out.iterdir()} - {"summary.json"}
    monkeypatch.setattr(SftLearner, "save_model", lambda _, folder: refuse(folder))
    with pytest.raises(ModelError, match="No space left"):
        sft(TALKS, out, **FEW | {"steps": 3}, resume=True)
    assert names <= {path.name for path in out.iterdir()}
    assert weights_of(out)
