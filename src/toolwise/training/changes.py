"""Settings of a run that may change when it is resumed, and the record of those that did: `changes.jsonl`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolwise.config.loader import build_config
from toolwise.config.paths import resolve_paths
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import CheckpointError, ConfigError
from toolwise.serialization.json_text import json_text
from toolwise.training.trackers.jsonl import read_metrics

CHANGES = "changes.jsonl"
NONE = "none"
MAX_VALUE_CHARS = 80

MUTABLE_SETTINGS = frozenset(
    {
        "name",
        "deterministic",
        # where and how fast the model computes
        "model.device",
        "model.threads",
        "rollout.cache_mb",
        "rollout.max_batch",
        "rollout.max_concurrent",
        "rollout.max_concurrent_requests",
        "rollout.max_concurrent_envs",
        "multi_turn.max_concurrent_calls",
        "actor.micro_batch_tokens",
        "actor.share_prefixes",
        "actor.logit_chunk_tokens",
        "actor.activation_checkpointing",
        "rollout.vllm.base_url",
        "rollout.vllm.command",
        "rollout.vllm.model",
        "rollout.vllm.api_key_env",
        "rollout.vllm.weights_dir",
        # deadlines
        "rollout.deadline_s",
        "rollout.vllm.start_s",
        "rollout.vllm.timeout_s",
        "multi_turn.tool_timeout_s",
        "tools[].timeout_s",
        "tools[].start_timeout_s",
        # learning rates and their schedules, which count updates from the start of the run
        "actor.lr",
        "actor.lr_schedule",
        "actor.warmup_steps",
        "actor.schedule_steps",
        "actor.min_lr_ratio",
        "critic.lr",
        "critic.lr_schedule",
        "critic.warmup_steps",
        "router.lr",
        "router.lr_schedule",
        "router.warmup_steps",
        "router.min_lr_ratio",
        # the place in the data is counted in tasks, not in batches
        "data.batch_size",
        "data.drop_last",
        # where rewards run, and when the run gives up
        "reward.sandbox.tier",
        "reward.sandbox.timeout_s",
        "reward.sandbox.memory_mb",
        "reward.sandbox.read",
        "reward.sandbox.permissions",
        "reward.sandbox.require",
        "reward.sandbox.workers",
        "reward.sandbox.trusted",
        "reward.max_error_rate",
        "faults.policy",
        "faults.env",
        "faults.deadline",
        "faults.infrastructure",
        "faults.tool",
        "faults.parse",
        "faults.window",
        "actor.canary",
        # how long the run is, what it saves and when it validates
        "trainer.total_steps",
        "trainer.save_every",
        "trainer.keep_checkpoints",
        "trainer.keep_best",
        "trainer.best_metric",
        "trainer.console",
        "validation.do_sample",
        "validation.every",
        "validation.before",
    }
)
"""Anything else would make it another run: other data, another model, another loss, another reward."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting with its old and new value; None where it was not set, or empty."""

    key: str
    old: Any
    new: Any

    @property
    def allowed(self) -> bool:
        return re.sub(r"\[\d+\]", "[]", self.key) in MUTABLE_SETTINGS or _is_moved_file(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.key}: {_display_value(self.old)} → {_display_value(self.new)}"


def changes_between(before: RunConfig, now: RunConfig) -> list[Change]:
    """Every setting that differs, in the order of the schema."""
    old, new = _flatten(comparable_settings(before)), _flatten(comparable_settings(now))
    keys = [*new, *(key for key in old if key not in new)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def check_same_run(config: RunConfig, config_file: Path) -> None:
    """Whether the run of `config_file` may be resumed under `config`; if not, one error names all that differs."""
    try:
        before = load_config(config_file)
    except ConfigError as fault:
        raise CheckpointError(f"cannot resume: {fault}; put the file right, or choose another --out") from fault
    changes = changes_between(before, config)
    fixed = [str(change) for change in changes if not change.allowed]
    if not fixed:
        return
    allowed = [str(change) for change in changes if change.allowed]
    also = f" (these may change: {', '.join(allowed)})" if allowed else ""
    raise ConfigError(
        f"cannot resume {config_file.parent} with other settings than it began with: {', '.join(fixed)}{also}; "
        f"use a new --out, or go on with its own: {resume_command(config_file.parent)}"
    )


def load_run_config(out: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings of the run in `out`, which is to be resumed."""
    if not (out / "config.toml").is_file():
        there = "has no config.toml" if out.is_dir() else "does not exist"
        raise ConfigError(f"{out} holds no run to resume (it {there}): name the folder that a run was started with")
    try:
        return load_config(out / "config.toml", overrides)
    except ConfigError as fault:
        raise CheckpointError(f"cannot resume: {fault}") from fault


def check_files(config: RunConfig, run: Path, *sections: str) -> None:
    """Whether the files that the run's config.toml names in `sections` ("data.val", "reward", "tools") are there."""
    named = _flatten({"data": config.data.model_dump(mode="json"), "tools": config.tools})
    named |= _flatten(
        {"reward": config.reward.model_dump(include={"function", "parts"}), "env": {"name": config.env.name}}
    )
    missing = [
        (key, file)
        for key, value in named.items()
        if key.startswith(sections)
        for entry in (value if isinstance(value, list) else [value])
        if (file := _file(entry)) is not None and not file.exists()
    ]
    if missing:
        files = ", ".join(f"{file} ({key})" for key, file in missing)
        option = "--reward" if sections == ("reward",) else f"--set {missing[0][0]}="
        raise ConfigError(
            f"{run / 'config.toml'} names what is not there: {files}; put it back, or, if the project was moved, give "
            f"its new place with {option}…"
        )


def _file(value: Any) -> Path | None:
    """The file of a setting that is a whole path or a reference to a Python file; None for anything else."""
    text = str(value) if isinstance(value, str | Path) else ""
    file = text.rpartition(":")[0] if ".py:" in text else text
    return Path(file) if Path(file).is_absolute() else None


def _is_moved_file(old: Any, new: Any) -> bool:
    """Whether `new` names the same files as `old`, which are gone from where they were."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(a == b or _is_moved_file(a, b) for a, b in zip(old, new, strict=True))
    before, now = _file(old), _file(new)
    if before is None or now is None or Path(str(old)).name != Path(str(new)).name:
        return False
    return now.exists() and not before.exists()


def resume_command(out: Path) -> str:
    """What to type to go on with a run."""
    return f"toolwise resume {shlex.quote(str(out))}"


def comparable_settings(config: RunConfig) -> dict[str, Any]:
    """Settings with paths as what they lead to, from wherever and by whatever links the run was started."""
    settings = resolve_paths(config.model_dump(mode="json"), Path.cwd())
    for which in ("train", "val"):
        if settings["data"][which] is not None:
            settings["data"][which] = str(Path(settings["data"][which]).resolve())
    return settings


def portable_config(config: RunConfig, out: Path) -> RunConfig:
    """As config.toml says it: what lies in the run's folder relative to that, so that the folder can be moved."""
    settings, folder = resolve_paths(config.model_dump(), Path.cwd()), out.resolve()
    data, reward, env = settings["data"], settings["reward"], settings["env"]
    for which in ("train", "val"):
        data[which] = _relative(data[which], folder)
    for table in (reward, *reward["parts"]):
        table["function"] = _relative(table["function"], folder)
    env["name"] = _relative(env["name"], folder)
    for place, entry in enumerate(settings["tools"]):
        if isinstance(entry, dict):
            entry["name"] = _relative(entry.get("name"), folder)
        else:
            settings["tools"][place] = _relative(entry, folder)
    return RunConfig.model_validate(settings)


def _relative(value: Any, folder: Path) -> Any:
    """A path, or a reference to a file, relative to `folder` where it lies in it; anything else as it is."""
    text = str(value) if isinstance(value, str | Path) else ""
    file, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not file or not Path(file).is_absolute() or not Path(file).resolve().is_relative_to(folder):
        return value
    return f"{Path(file).resolve().relative_to(folder)}{colon}{name}"


def saved_settings(config: RunConfig, out: Path) -> dict[str, Any]:
    """What a checkpoint keeps of the settings it was made under. A default counts as not said: a new setting of a newer
    version changes nothing."""
    return portable_config(config, out).model_dump(mode="json", exclude_defaults=True)


def changes_since(settings: Any, config: RunConfig, out: Path) -> list[Change]:
    """What differs from the `saved_settings` of a checkpoint."""
    if not isinstance(settings, Mapping):  # a checkpoint of an earlier version keeps none
        return []
    try:
        before = build_config(RunConfig, resolve_paths(settings, out.resolve()), source=str(out))
    except ConfigError:  # settings that this version does not know any more
        return []
    return changes_between(before, config)


def record_changes(out: Path, step: int, changes: list[Change]) -> None:
    """Settings that changed at `step`, in place of what was recorded there or later: that was undone."""
    kept = [line for line in read_changes(out) if line["step"] < step]
    lines = [*kept, *({"step": step, **asdict(change)} for change in changes)]
    file = out / CHANGES
    if lines or file.exists():
        aside = file.with_name(f"{CHANGES}.tmp")
        aside.write_text("".join(f"{json_text(line)}\n" for line in lines), encoding="utf-8")
        aside.replace(file)


def read_changes(out: Path) -> list[dict[str, Any]]:
    """Every change of settings in the run's life: step, key, old, new."""
    return read_metrics(out / CHANGES)


def describe_changes(out: Path) -> list[str]:
    """The same as sentences: `step 40: actor.lr: 1e-05 → 2e-05`."""
    lines = read_changes(out)
    return [f"step {line['step']}: {Change(line['key'], line['old'], line['new'])}" for line in lines]


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Leaves of nested tables by their dotted key; lists of tables by index. What is empty is left out."""
    if value in ({}, []):
        return {}
    if isinstance(value, dict):
        items = [(f"{key}.{name}".lstrip("."), item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {key: value}
    return {deeper: leaf for name, item in items for deeper, leaf in _flatten(item, name).items()}


def _display_value(value: Any) -> str:
    if value is None:
        return NONE
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 1]}…"
