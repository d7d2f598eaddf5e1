"""Settings that may change when a run is resumed, and the record of those that did: `changes.jsonl`."""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from toolwise.config.loader import build_config, read_settings
from toolwise.config.paths import relative_paths, resolve_paths
from toolwise.config.schema import RunConfig, load_config
from toolwise.config.sft import MUTABLE_SFT_SETTINGS, SftConfig, is_sft_config, load_sft_config
from toolwise.errors import CheckpointError, ConfigError
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_line
from toolwise.training.trackers.jsonl import read_metrics

AnyConfig = RunConfig | SftConfig
Config = TypeVar("Config", bound=RunConfig | SftConfig)
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
        "agent.python",
        "agent.max_concurrent",
        "multi_turn.max_concurrent_calls",
        "actor.micro_batch_tokens",
        "actor.share_prefixes",
        "actor.logit_chunk_tokens",
        "actor.activation_checkpointing",
        "actor.optimizer_state",
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
        # the position in the data is counted in tasks, not in batches
        "data.batch_size",
        "data.drop_last",
        "data.cache",
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
        "actor.mismatch_check",
        # how long the run is, what it saves and when it validates
        "trainer.total_steps",
        "trainer.save_every",
        "trainer.async_checkpoints",
        "trainer.keep_checkpoints",
        "trainer.keep_best",
        "trainer.best_metric",
        "trainer.early_stopping",
        "trainer.keep_cache",
        "trainer.console",
        "trainer.trackers",
        "trainer.callbacks",
        "trainer.observer_timeout_s",
        "records.token_share",
        "records.token_steps",
        "records.plain_steps",
        "validation.do_sample",
        "validation.every",
        "validation.before",
        # the options of a user's parts, as the learning rates above: which part it is stays the same
        "algorithm.estimator_kwargs",
        "actor.policy_loss_kwargs",
        "router.kwargs",
        "data.sampler_kwargs",
        "router.timeout_s",
    }
)
"""Changing anything else would make it a different run: other data, another model, loss or reward."""


_INSIDE_SETTING = re.compile(
    r"^(trainer\.trackers|trainer\.callbacks|algorithm\.estimator_kwargs|actor\.policy_loss_kwargs|router\.kwargs"
    r"|data\.sampler_kwargs)[.\[].*"
)


_OTHER_PLACE = re.compile(r"router\.policies\..+\.(base_url|api_key_env|timeout_s|max_concurrent)|cluster\..+")
"""Where the other model of a route is served, which model it is stays the same; and where the run's processes are."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting with its old and new value; None if unset or empty."""

    key: str
    old: Any
    new: Any

    @property
    def allowed(self) -> bool:
        setting = re.sub(r"\[\d+\]", "[]", _INSIDE_SETTING.sub(r"\1", self.key))
        # The two kinds of run have no setting in common that may change in one and not in the other.
        listed = setting in MUTABLE_SETTINGS | MUTABLE_SFT_SETTINGS or _OTHER_PLACE.fullmatch(self.key)
        return bool(listed) or _is_moved_file(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.key}: {_display_value(self.old)} → {_display_value(self.new)}"


def changes_between(before: AnyConfig, now: AnyConfig) -> list[Change]:
    """Every setting that differs, in schema order."""
    old, new = _flatten(comparable_settings(before)), _flatten(comparable_settings(now))
    return [Change(key, old.get(key), new.get(key)) for key in {**new, **old} if old.get(key) != new.get(key)]


def check_same_run(config: AnyConfig, config_file: Path) -> None:
    """Raise unless the run of `config_file` may be resumed with `config`; the error names all differences."""
    try:
        before = _load_recorded(config_file)
    except ConfigError as fault:
        raise CheckpointError(f"cannot resume: {fault}; fix the file, or choose another --out") from fault
    changes = changes_between(before, config)
    forbidden = [str(change) for change in changes if not change.allowed]
    if not forbidden:
        return
    allowed = ", ".join(str(change) for change in changes if change.allowed)
    also = f" (these may change: {allowed})" if allowed else ""
    raise ConfigError(
        f"cannot resume {config_file.parent} with changed settings: {', '.join(forbidden)}{also}; "
        f"use a new --out, or resume with the recorded settings: {resume_command(config_file.parent)}"
    )


def load_run_config(out: Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Load the settings of the run in `out`, of `train` or of `sft`, in order to resume it."""
    if not (out / "config.toml").is_file():
        why = "has no config.toml" if out.is_dir() else "does not exist"
        raise ConfigError(f"{out} holds no run to resume (it {why}): give the folder of a run")
    file = out / "config.toml"
    try:
        return _load_recorded(file, overrides)
    except ConfigError as fault:
        raise CheckpointError(f"cannot resume: {fault}") from fault


def _load_recorded(file: Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """The settings in a run's config.toml, which has all of them. A run of a version that set no tasks aside for
    calibration still learns from all of them."""
    if is_sft_config(file):
        return load_sft_config(file, overrides)
    earlier = [] if "calibration" in (read_settings(file).get("router") or {}) else ["router.calibration=0"]
    return load_config(file, [*earlier, *overrides])


def check_files(config: RunConfig, run: Path, *sections: str) -> None:
    """Raise unless the files that the run's config.toml names in `sections` ("data.val", "reward", "tools") exist."""
    named = _flatten(
        {
            "data": config.data.model_dump(mode="json", include={"train", "val", "sampler"}),
            "tools": config.tools,
            "reward": config.reward.model_dump(include={"function", "parts"}),
            "env": {"name": config.env.name},
            "agent": {"run": config.agent.run},
            "router": {"name": config.router.name},
            "rollout": {"tool_parser": config.rollout.tool_parser},
            "algorithm": {"adv_estimator": config.algorithm.adv_estimator},
            "actor": {"policy_loss": config.actor.policy_loss},
        }
    )
    for kind, entries in (("trackers", config.trainer.trackers), ("callbacks", config.trainer.callbacks)):
        named[f"trainer.{kind}"] = [entry if isinstance(entry, str) else entry.name for entry in entries]
    missing = [
        (key, file)
        for key, value in named.items()
        if key.startswith(sections)
        for entry in (value if isinstance(value, list) else [value])
        if (file := _file(entry)) is not None and not _exists(file)
    ]
    if missing:
        option = "--reward" if sections == ("reward",) else f"--set {missing[0][0]}="
        raise ConfigError(
            f"{run / 'config.toml'} names missing files: {', '.join(f'{file} ({key})' for key, file in missing)}; "
            f"restore them, or, if the project was moved, give the new path with {option}…"
        )


def _file(value: Any) -> Path | None:
    """The file of a setting that is an absolute path or a reference to a Python file; None for anything else."""
    text = str(value) if isinstance(value, str | Path) else ""
    file = text.rpartition(":")[0] if ".py:" in text else text
    return Path(file) if Path(file).is_absolute() else None


def _exists(file: Path) -> bool:
    """Whether there is such a file, or one that matches the pattern."""
    return file.exists() or any(glob.iglob(str(file), recursive=True))


def _is_moved_file(old: Any, new: Any) -> bool:
    """Whether `new` names the same files as `old`, which have been moved."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(a == b or _is_moved_file(a, b) for a, b in zip(old, new, strict=True))
    before, now = _file(old), _file(new)
    if before is None or now is None or Path(str(old)).name != Path(str(new)).name:
        return False
    return _exists(now) and not _exists(before)


def resume_command(out: Path) -> str:
    return f"toolwise resume {shlex.quote(str(out))}"


def comparable_settings(config: AnyConfig) -> dict[str, Any]:
    """Settings with resolved paths, independent of the working directory and of links."""
    settings = resolve_paths(config.model_dump(mode="json"), Path.cwd())
    for which in ("train", "val"):
        if settings["data"][which] is not None:
            settings["data"][which] = _without_links(settings["data"][which])
    return settings


def _without_links(sources: Any) -> Any:
    """Task files, as one path or as a list of paths and tables, with links resolved."""
    if isinstance(sources, list):
        return [_without_links(source) for source in sources]
    if isinstance(sources, dict):
        return sources | {"path": _without_links(sources["path"])}
    return str(Path(sources).resolve())


def portable_config(config: Config, out: Path) -> Config:
    """The config for config.toml: paths inside the run folder become relative, so that the folder can be moved."""
    settings = relative_paths(resolve_paths(config.model_dump(), Path.cwd()), out.resolve())
    return cast(Config, type(config).model_validate(settings))


def saved_settings(config: AnyConfig, out: Path) -> dict[str, Any]:
    """The settings that a checkpoint stores. Defaults are omitted, so that settings added in a newer version do not
    count as changes."""
    return portable_config(config, out).model_dump(mode="json", exclude_defaults=True)


def changes_since(settings: Any, config: AnyConfig, out: Path) -> list[Change]:
    """What differs from the `saved_settings` of a checkpoint."""
    if not isinstance(settings, Mapping):  # checkpoints of earlier versions have none
        return []
    try:
        before = build_config(type(config), resolve_paths(settings, out.resolve()), source=str(out))
        return changes_between(before, config)
    except ConfigError:  # settings that this version no longer has
        return []


def record_changes(out: Path, step: int, changes: list[Change]) -> None:
    """Record settings that changed at `step`; replaces entries from `step` on, which the resume has undone."""
    lines = [line for line in read_changes(out) if line["step"] < step]
    lines += [{"step": step, **asdict(change)} for change in changes]
    if lines or (out / CHANGES).exists():
        write_atomic(out / CHANGES, b"".join(map(json_line, lines)))


def read_changes(out: Path) -> list[dict[str, Any]]:
    """All recorded changes of settings: step, key, old, new."""
    return read_metrics(out / CHANGES)


def describe_changes(out: Path) -> list[str]:
    """All recorded changes as text: `step 40: actor.lr: 1e-05 → 2e-05`."""
    return [f"step {line['step']}: {Change(line['key'], line['old'], line['new'])}" for line in read_changes(out)]


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Leaves of nested tables by dotted key; lists of tables by index. Empty values are omitted."""
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
