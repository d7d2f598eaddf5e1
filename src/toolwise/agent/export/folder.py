"""From a checkpoint to a folder that plain `transformers` loads: there whole or not at all, and loaded to be sure."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from toolwise.agent.calibration import ROUTER_METADATA_FILE
from toolwise.agent.export.card import TOOL_TEXT, model_card
from toolwise.agent.export.weights import convert, saved_dtype
from toolwise.config.schema import RunConfig, inference_settings, load_config
from toolwise.errors import CheckpointError, ConfigError, ModelError
from toolwise.models import load_model
from toolwise.rollout.tool_prompt import describe_tools
from toolwise.serialization.files import disk_fault
from toolwise.serialization.json_text import json_text
from toolwise.tools.tool_record import read_tools
from toolwise.training import checkpoint
from toolwise.training.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported, and where to."""

    out: Path
    checkpoint: Checkpoint
    dtype: str


def export_model(source: Path, out: Path, *, dtype: str | None = None, best: str = "") -> Export:
    """Write the model of `source`, a run's folder or one of its checkpoints, to `out`.

    Of a run it is the latest checkpoint, or the best by the validation figure that `best` names ("-cost": the lowest).
    The weights are as they were saved, or in another `dtype`: "float32", "bfloat16", "float16".
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose another --out, nothing is ever overwritten")
    run, found = find_model(source, best)
    config = load_config(run / "config.toml")
    aside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        saved_in = _write_export(aside, found, config, run, dtype)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except FileNotFoundError as fault:
        if found.path.exists():
            raise
        raise CheckpointError(f"{found.path} was removed by its run while it was read: try again") from fault
    except Exception as fault:
        if (reason := disk_fault(fault)) is None:
            raise
        raise ModelError(f"cannot write {out}: {reason}; nothing was left there") from fault
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Export(out, found, dtype or saved_in)


def find_model(source: Path, best: str = "") -> tuple[Path, Checkpoint]:
    """The run's folder, and the checkpoint in it that `source` means."""
    named = (source / checkpoint.MANIFEST).is_file()
    run = source.resolve().parent.parent if named else source
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} has no config.toml: name a run's folder, or RUN/checkpoints/step-…")
    if named and best:
        raise ConfigError(f"{source} is one checkpoint: name its run, {run}, to choose among its checkpoints by --best")
    if named:
        return run, checkpoint.load(source)
    folder, damaged = run / "checkpoints", list[str]()
    if best:
        found = checkpoint.best(folder, best, warnings_out=damaged)
    else:
        found = checkpoint.latest(folder, warnings_out=damaged)
    if damaged:  # an older one would pass for the one that was asked for
        raise CheckpointError(f"{damaged[0].removeprefix('passed over: ')}: toolwise export RUN/checkpoints/step-…")
    if found is None and best:
        raise CheckpointError(
            f"no checkpoint in {folder} was validated for {best.removeprefix('-')!r}: {_available_metrics(folder)}"
        )
    if found is None:
        raise CheckpointError(f"{source} has no whole checkpoint yet: wait for its first one")
    return run, found


def _available_metrics(folder: Path) -> str:
    found = checkpoint.latest(folder, warnings_out=[])
    names = sorted(found.figures) if found is not None else []
    return f"there is {', '.join(names)}" if names else "leave --best out to export the latest"


def _write_export(aside: Path, found: Checkpoint, config: RunConfig, run: Path, dtype: str | None) -> str:
    """Everything into `aside`; says what the weights were saved in."""
    model = found.path / "model"
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model} has no config.json: the checkpoint holds no model to export")
    for path in sorted(model.rglob("*")):
        target = aside / path.relative_to(model)
        if path.is_dir():
            target.mkdir()
        else:
            shutil.copyfile(path, target)
    _record_settings(aside, config)
    saved_in = saved_dtype(aside)
    if dtype is not None and dtype != saved_in:
        convert(aside, dtype)
    if not (aside / "generation_config.json").exists():
        _write_generation_config(aside, trusted=config.model.trust_remote_code)
    try:
        trusted = config.model.trust_remote_code
        _, chat = load_model(str(aside), device="cpu", dtype=dtype or saved_in, trust_remote_code=trusted)
    except ModelError as fault:
        raise ModelError(f"what was exported does not load, so it was removed again: {fault}") from fault
    prompt, tools = None, list(read_tools(aside).values())
    if tools:
        prompt = chat.set_tool_prompt(config.rollout.tool_prompt, config.rollout.tool_parser)
        if prompt.where in ("system", "user"):
            (aside / TOOL_TEXT).write_text(describe_tools(tools, prompt.form), encoding="utf-8")
    card = model_card(config, found, run, dtype=dtype or saved_in, saved_in=saved_in, tool_prompt=prompt)
    (aside / "README.md").write_text(card, encoding="utf-8")
    return saved_in


def _record_settings(folder: Path, config: RunConfig) -> None:
    """How a routed agent rolls out, for checkpoints of earlier versions, which do not say it themselves."""
    file = folder / ROUTER_METADATA_FILE
    if file.is_file():
        try:
            facts = inference_settings(config) | json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, TypeError, RecursionError) as fault:
            raise CheckpointError(f"{file.name} of the checkpoint cannot be read ({fault}): take another one") from None
        file.write_text(json_text(facts, indent=2) + "\n", encoding="utf-8")


def _write_generation_config(folder: Path, *, trusted: bool) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
