"""Folders with LoRA adapters alone: they name their base model, with checksums of its weights, and load as the model
that both together are."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError, ToolwiseError, import_extra
from toolwise.models.folder import is_adapters, is_hub_name, locate, read_json_object
from toolwise.serialization.files import file_digest
from toolwise.serialization.json_text import json_text

log = logging.getLogger("toolwise.models")

BASE_FILE = "base_model.json"
ADAPTER_CONFIG = "adapter_config.json"
NAME_FIELDS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Fields of peft's configuration with names of modules, most of which it matches as regular expressions."""
PLAIN_FIELDS = frozenset(
    {
        *NAME_FIELDS, "r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "layers_to_transform",
        "init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "loftq_config", "qalora_group_size",
        "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
        "inference_mode", "megatron_core", "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
"""What may be set: scales, where the adapters are, how they began and what was only of use in training."""


def _is_list(value: Any, kinds: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kinds) and not isinstance(each, bool) for each in value)


def _is_pattern(value: Any, kinds: Any) -> bool:
    return isinstance(value, dict) and _is_list(list(value.values()), kinds)


def _are_finite(values: Any) -> bool:
    try:
        return _is_list(values, int | float) and all(map(math.isfinite, values))
    except OverflowError:  # a whole number that no float can hold
        return False


_FIELD_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number above 0", lambda value: _is_list([value], int) and value > 0),
    "lora_alpha": ("a number", lambda value: _are_finite([value])),
    "lora_dropout": ("a number", lambda value: _are_finite([value])),
    "use_rslora": ("true or false", lambda value: isinstance(value, bool)),
    "fan_in_fan_out": ("true or false", lambda value: isinstance(value, bool)),
    "target_modules": ("a list of names", lambda value: value == "all-linear" or _is_list(value, str)),
    "exclude_modules": ("a list of names", lambda value: _is_list(value, str)),
    "layers_to_transform": ("a list of numbers", lambda value: _is_list(value, int) or _is_list([value], int)),
    "layers_pattern": ("a list of names", lambda value: _is_list(value, str)),
    "rank_pattern": ("a table of whole numbers", lambda value: _is_pattern(value, int)),
    "alpha_pattern": (
        "a table of numbers",
        lambda value: _is_pattern(value, int | float) and _are_finite(list(value.values())),
    ),
    "revision": ("text", lambda value: isinstance(value, str)),
}
"""What peft takes; it reports another type with whatever error happens to come from it."""


def write_base(folder: Path, name: str, revision: str, base: Path) -> None:
    """Record the base model of the adapters in `folder`: its public name, and a checksum of each file of weights."""
    record = {"name": name, "revision": revision, "files": _digests(base)}
    (folder / BASE_FILE).write_text(json_text(record, indent=1) + "\n", encoding="utf-8")


def find_base(folder: Path, given: str = "", *, verified: bool = True) -> Path:
    """The folder of the adapters' base model: `given`, or the model of the name that they record. A base that was a
    folder is looked for beside that of the adapters. Raises if it is missing or, if `verified`, another one."""
    record = _read_base(folder)
    name, revision = record["name"], record["revision"]
    missing = f"{folder} holds LoRA adapters for the model {name!r}, which is not here"
    cure = "give the folder of that model with --set model.base=FOLDER"
    named = name.startswith("builtin:") or is_hub_name(name)
    if not given and not named:
        beside = folder.resolve().parent / name
        if not name or name != Path(name).name or not beside.is_dir():  # a folder must not choose which others are read
            raise ModelError(f"{missing}: {cure}")
        given = str(beside)
    try:
        base = Path(locate(given) if given else locate(name, revision))
    except ToolwiseError as fault:
        if given:
            raise
        raise ModelError(f"{missing} ({fault}): {cure}") from None
    if is_adapters(base):
        raise ModelError(f"{base} holds adapters too, and is no base model for {folder}: {cure}")
    if verified:
        _check_base(base, record["files"], folder, f"is not the model that the adapters in {folder} belong to: {cure}")
    return base


def _check_base(base: Path, files: dict[str, Any], folder: Path, problem: str) -> None:
    if not files:
        log.warning("%s has no checksums of its base model (%s): whether %s is that model is not known",
                    folder, BASE_FILE, base)  # fmt: skip
        return
    if {path.name for path in _weights(base)} != set(files):
        raise ModelError(f"{base} {problem}")
    for path in _weights(base):
        if path.stat().st_size != files[path.name]["size"] or file_digest(path) != files[path.name]["sha256"]:
            raise ModelError(f"{base} {problem} ({path.name} has another sha256)")


def add_adapters(model: Any, folder: Path) -> Any:
    """The model with the adapters of `folder` merged in, as training computed with them; `model` is used up."""
    from toolwise.models.merged_weights import merged_copy

    peft = import_extra("peft", "peft")
    _check_config(folder / ADAPTER_CONFIG)
    try:
        peft.PeftModel.from_pretrained(model, folder)
    except Exception as fault:  # peft raises many types
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise ModelError(f"the adapters in {folder} do not fit their base model: {reason}") from fault
    return merged_copy(model)


def _check_config(file: Path) -> None:
    """Raises for what is not W + s·B·A, and for patterns: one of a stranger may take for ever to match."""
    config = read_json_object(file)
    for name, (description, is_valid) in _FIELD_TYPES.items():
        value = config.get(name)
        is_text_pattern = isinstance(value, str) and name in NAME_FIELDS
        if value is not None and not is_text_pattern and not is_valid(value):
            raise ModelError(f"{file}: {name} must be {description}, not {value!r:.60}")
    for name, value in config.items():
        if name not in PLAIN_FIELDS and value not in (None, False, "none", [], {}):
            raise ModelError(
                f"{file}: {name} makes other adapters than W + B·A; merge them into their model with peft "
                "(merge_and_unload) and use that"
            )
    for name in NAME_FIELDS:
        value = config.get(name)
        names = [] if value is None or (name, value) == ("target_modules", "all-linear") else value
        if isinstance(names, str) or not all(re.fullmatch(r"[\w.-]+", str(each), re.ASCII) for each in names):
            raise ModelError(f"{file}: {name} is a pattern; list the names of the modules")


def _read_base(folder: Path) -> dict[str, Any]:
    """What write_base recorded; of other adapters the name alone."""
    file = folder / BASE_FILE
    if not file.is_file():
        config = read_json_object(folder / ADAPTER_CONFIG)
        name, revision = config.get("base_model_name_or_path"), config.get("revision")
        if not isinstance(revision, str | None):
            raise ModelError(f"{folder / ADAPTER_CONFIG}: revision must be text, not {revision!r:.60}")
        return {"name": name if isinstance(name, str) else "", "revision": revision or "", "files": {}}
    record = read_json_object(file)
    texts = isinstance(record.get("name"), str) and isinstance(record.get("revision"), str)
    files = record.get("files")
    if not texts or not isinstance(files, dict) or not all(_is_entry(entry) for entry in files.values()):
        raise ModelError(f"{file} does not name a base model: export the adapters again")
    return record


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and {"size", "sha256"} <= entry.keys()


def _digests(base: Path) -> dict[str, dict[str, Any]]:
    return {path.name: {"size": path.stat().st_size, "sha256": file_digest(path)} for path in _weights(base)}


def _weights(base: Path) -> list[Path]:
    """A router's head beside the model is not part of it."""
    return [path for path in sorted(base.glob("*.safetensors")) if path.name != "router.safetensors"]
