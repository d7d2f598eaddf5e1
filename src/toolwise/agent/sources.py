"""Finds what a path or a name on a hub refers to: an agent folder, a run, a checkpoint, a plain model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.config.imports import did_you_mean
from toolwise.config.loader import CONFIG_SUFFIXES, apply_overrides, build_config
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, load_config
from toolwise.errors import CheckpointError, ConfigError
from toolwise.models import locate
from toolwise.models.folder import is_adapters, is_hub_name
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.training import checkpoint
from toolwise.training.agent_bundle import is_inside, known_settings, read_bundle
from toolwise.training.checkpoint import Checkpoint
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE, verify_agent, without_links


def has_router(model: str | Path) -> bool:
    return (Path(model) / ROUTER_METADATA_FILE).is_file()


def find_agent(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool = False,
    use_tools: bool = True,
    use_reward: bool = False,
    only_copied: bool = False,
) -> tuple[RunConfig, str]:
    """The configuration of an agent, and the folder or name of its model. `only_copied`: its code is not run."""
    source = local_source(source, overrides)
    path = Path(source)
    if is_agent_folder(path):
        manifest = verify_agent(path)
        files = without_links(path, manifest.seal)
        settings = read_bundle(
            manifest.settings,
            path,
            overrides,
            files=files,
            trust_code=trust_code,
            use_tools=use_tools,
            use_reward=use_reward,
            only_copied=only_copied,
        )
        if has_router(path):
            stored = _stored_router(path, overrides, files=files)
            settings["router"] = apply_overrides(stored, _of_router(overrides))["router"]
            if not only_copied:
                _require_policies(path, settings["router"])
        return build_config(RunConfig, settings, source=str(path / AGENT_FILE)), str(path)
    if _is_checkpoint(path) or _is_checkpoint(path.parent) or has_router(path) or _is_run(path):
        config, model = find_router(path, overrides)
        return config, str(model)
    if path.is_dir() and not (path / "config.json").is_file() and not is_adapters(path):
        raise CheckpointError(f"{path} is not an agent, a run, a checkpoint or a model folder: give one")
    name = str(source)
    settings = apply_overrides({"model": {"path": name}}, overrides)
    locate(name, str(settings["model"].get("revision", "")))
    return build_config(RunConfig, settings, source=name), name


def local_source(source: str | Path, overrides: Sequence[str] = ()) -> str | Path:
    """The downloaded folder of an agent on a hub, at `model.revision` if the overrides set it, and the agent folder in
    a checkpoint that is not in its run; anything else stays as it is, such as the name of a plain model."""
    name, path = str(source), Path(source).expanduser()
    if path.exists():
        step = path if _is_checkpoint(path) else path.parent
        moved = _is_checkpoint(step) and (step / "model" / AGENT_FILE).is_file() and not _is_in_run(step)
        return step / "model" if moved else source
    if not is_hub_name(name):
        return source
    if runs := sorted(file.parent.name for file in path.parent.glob("*/config.toml")):
        hint = did_you_mean(path.name, runs) or f"; its latest is {runs[-1]!r}"
        raise CheckpointError(f"there is no run {path.name!r} in {path.parent}{hint}")
    revision = apply_overrides({"model": {}}, overrides)["model"].get("revision")
    folder = Path(locate(name, str(revision or "")))
    return folder if is_agent_folder(folder) or has_router(folder) else source


def is_agent_folder(path: str | Path) -> bool:
    """Checkpoints are, but within their run they belong to it: its settings may have changed since."""
    path = Path(path)
    return (path / AGENT_FILE).is_file() and not (_is_checkpoint(path.parent) and _is_in_run(path.parent))


def is_model(path: Path) -> bool:
    """Whether it is an agent folder, a plain model folder or the name of a model."""
    is_folder = ((path / "config.json").is_file() and not (path / "config.toml").is_file()) or is_adapters(path)
    is_folder = is_folder and not _is_checkpoint(path.parent)
    path = Path(local_source(path)) if path.exists() else path
    is_name = is_hub_name(str(path)) and not path.exists() and path.suffix not in CONFIG_SUFFIXES
    return is_agent_folder(path) or is_folder or is_name or str(path).startswith("builtin:")


def _is_run(path: Path) -> bool:
    """An SFT run's folder is a plain model folder in the end, a training run's is not."""
    return (path / "config.toml").is_file() and not (path / "config.json").is_file()


def find_router(source: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """The configuration and the folder with the model and its head."""
    source = Path(local_source(source, overrides))
    if is_agent_folder(source) and has_router(source):
        config, model = find_agent(source, overrides, use_tools=False)
        return config, Path(model)
    # The router.json of a checkpoint is the router's training state, that of its model folder describes the head.
    if has_router(source) and not _is_checkpoint(source) and not _is_checkpoint(source.parent):
        return _exported_config(source, overrides), source
    if (source / "config.json").is_file() and _is_checkpoint(source.parent):
        source = source.parent  # from the model's folder to its checkpoint
    problem = f"is not a run, a checkpoint or an exported model with a router ({ROUTER_METADATA_FILE}): give one"
    return load_config(find_run(source, problem) / "config.toml", overrides), find_checkpoint(source).path / "model"


def find_run(source: Path, problem: str) -> Path:
    """The folder of the run; raises "SOURCE `problem`" if there is none."""
    if _is_checkpoint(source):
        if not _is_in_run(source):
            raise CheckpointError(
                f"{source} is not in the folder of its run, and an earlier version wrote it without the settings of "
                "its agent: put it back into RUN/checkpoints, or export it from there"
            )
        return source.resolve().parent.parent
    if not (source / "config.toml").is_file():
        raise CheckpointError(f"{source} {problem}")
    return source


def find_checkpoint(
    source: Path, *, best: str = "", command: str = "give", hint: str = "wait for the first one"
) -> Checkpoint:
    """The checkpoint itself; for a run its latest, or the best by the validation metric `best` ("-cost": the lowest).

    `command` and `hint` say in an error what to do with a single checkpoint, or without any.
    """
    if _is_checkpoint(source):
        if best:
            raise ConfigError(
                f"{source} is a single checkpoint: give its run, {source.resolve().parent.parent}, to choose one of "
                "its checkpoints with --best"
            )
        return checkpoint.load(source)
    folder, damaged = source / "checkpoints", list[str]()
    chosen = (
        checkpoint.best(folder, best, warnings_out=damaged) if best else checkpoint.latest(folder, warnings_out=damaged)
    )
    if damaged:  # do not silently use an older one
        raise CheckpointError(f"{damaged[0].removeprefix('passed over: ')}: {command} RUN/checkpoints/step-…")
    if chosen is None and best:
        latest = checkpoint.latest(folder, warnings_out=[])
        names = ", ".join(sorted(latest.figures)) if latest is not None else ""
        available = f"available: {names}" if names else "leave --best out to export the latest"
        raise CheckpointError(f"no checkpoint in {folder} was validated for {best.removeprefix('-')!r}: {available}")
    if chosen is None:
        raise CheckpointError(f"{source} has no complete checkpoint yet: {hint}")
    return chosen


def _is_in_run(step: Path) -> bool:
    """Whether a checkpoint is where its run has written it."""
    folder = step.resolve().parent
    return folder.name == "checkpoints" and (folder.parent / "config.toml").is_file()


def _is_checkpoint(source: Path) -> bool:
    return (source / checkpoint.MANIFEST).is_file()


def _stored_router(folder: Path, overrides: Sequence[str], *, files: Path | None = None) -> dict[str, Any]:
    """`router` as router.json has it. A model folder must not choose which code runs, which server is asked, or which
    files outside it are read."""
    chosen_by_user = ("name", "kwargs", "policies", "labels")
    stored = _read_metadata(folder).get("router") or {}
    router = {name: value for name, value in stored.items() if name not in chosen_by_user}
    wording = str(router.get("wording") or "")
    if wording not in ("", "silent") and not any(each.startswith("router.wording=") for each in overrides):
        files = files or folder
        if not is_inside(wording, files) or not (files / wording).is_file():
            raise ConfigError(
                f"{folder}: its router was trained with the wording {Path(wording).name}, which is not in the folder: "
                "give it with --set router.wording=FILE"
            )
        router["wording"] = str(files / wording)
    return {"router": router}


def _of_router(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if override.startswith("router.")]


def _read_metadata(folder: Path) -> dict[str, Any]:
    file = folder / ROUTER_METADATA_FILE
    try:
        metadata: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not all(isinstance(metadata.get(name) or {}, dict) for name in ("router", *INFERENCE_FIELDS)):
            raise ValueError("a section is not a table")
    except (OSError, ValueError, AttributeError, RecursionError) as fault:
        raise CheckpointError(f"{file} cannot be read ({fault}): export the model again") from None
    return metadata


def _exported_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """Of an export without agent.json, as earlier versions wrote it."""
    metadata = _read_metadata(folder)
    # Only known inference fields: a model folder must not choose, for example, which program is started.
    settings = _stored_router(folder, overrides) | {
        section: known_settings(metadata.get(section) or {}, known) for section, known in INFERENCE_FIELDS.items()
    }
    parser = settings.get("rollout", {}).get("tool_parser", "")
    settings = apply_overrides(settings, overrides)
    _require_policies(folder, settings["router"])
    if ":" in str(parser) and settings["rollout"]["tool_parser"] == parser:
        raise ConfigError(
            f"{folder} was trained with the tool parser {parser}, which its folder must not choose: give the parser "
            "with --set rollout.tool_parser=FILE.py:NAME"
        )
    return build_config(RunConfig, settings, source=str(folder / ROUTER_METADATA_FILE))


def _require_policies(folder: Path, router: Mapping[str, Any]) -> None:
    """Raises if a route is answered by another model, which the user has not named."""
    routes = router.get("routes")
    for route in routes if isinstance(routes, list) else ():
        name = route.get("policy") if isinstance(route, Mapping) else None
        if name and name not in (router.get("policies") or {}):
            raise ConfigError(
                f"{folder}: the route {route.get('name')!r} is answered by another model, which its folder must not "
                f"choose: give --set router.policies.{name}.base_url=URL and --set router.policies.{name}.model=NAME, "
                f"or --set router.policies.{name}.path=FOLDER"
            )
