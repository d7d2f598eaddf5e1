"""The settings of an agent folder: collected from a run, with the code and documents they refer to, and read again.

A folder may come from anyone, so it does not decide which code runs: `read_bundle` refuses references to code, commands
and programs until the caller trusts the folder.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.config.imports import GIVEN_IN_PYTHON
from toolwise.config.loader import apply_overrides
from toolwise.config.paths import resolve_paths
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, inference_settings
from toolwise.config.secret_names import find_secret, is_secret, list_names
from toolwise.config.sibling_imports import imported_siblings
from toolwise.errors import CheckpointError, ConfigError
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.serialization.json_text import json_text
from toolwise.tools.builtin.search.tool import corpus_files

log = logging.getLogger("toolwise")

AGENT_FIELDS: dict[str, Any] = {
    **INFERENCE_FIELDS,
    "rollout": {**INFERENCE_FIELDS["rollout"], "do_sample": True, "deadline_s": True},
    "tools": True,
    "env": True,
    "reward": {"function", "kwargs", "parts", "combine"},
}
"""What an agent folder records; the router is described beside its head."""
CODE, DOCUMENTS = "code", "documents"
"""Folders of an agent folder."""
OWN_AGENT = "own_agent"
"""Marks the settings of a model that was trained inside an agent which is not ours."""
DATA_TOOLS = ("calculator", "search", "calc_gsm8k_reward")
"""Built-in tools that run no code and start no program."""
MAX_DATA_BYTES = 256 << 20
"""Larger documents of a search tool are not copied."""
_MACHINE_OPTIONS = {"search": ("cache",), "mcp": ("cwd",)}
"""Options of tools that name folders of one machine."""
_VARIABLE = re.compile(r"\$\{\w+\}")


Notify = Callable[[str], None]
"""Told of what an agent folder cannot hold."""


def write_bundle(config: RunConfig, folder: Path, notify: Notify = log.warning) -> dict[str, Any]:
    """Copy the code and documents that an agent needs into `folder`; return its settings, which refer to the copies."""
    settings = config.model_dump(mode="json", include=AGENT_FIELDS, exclude_none=True)
    if config.agent.enabled:
        settings[OWN_AGENT] = True
        notify("the export holds the model alone: the loop and the tools of your own agent are not part of it")
    copies = _Copies(folder, notify)
    settings["tools"] = [copies.tool(entry) for entry in settings["tools"]]
    for table, key in _reference_places(settings):
        table[key] = copies.reference(table[key])
    return _without_secrets(settings, notify)  # type: ignore[no-any-return]


def read_bundle(
    settings: Mapping[str, Any],
    folder: Path,
    overrides: Sequence[str],
    *,
    files: Path | None = None,
    trust_code: bool,
    use_tools: bool = True,
    use_reward: bool = False,
    only_copied: bool = False,
) -> dict[str, Any]:
    """The settings as sections of a configuration, with `overrides`. Raises if they name code that the caller neither
    trusts nor replaces. Tools and reward are left out if they are not used. `files` has the folder's files without
    links. `only_copied`: nothing of them is run."""
    files = files or folder
    stored = {name: value for name, value in copy.deepcopy(dict(settings)).items() if name != OWN_AGENT}
    if unknown := list(unknown_settings(stored, AGENT_FIELDS)):
        raise ConfigError(
            f"{folder}: agent.json sets {', '.join(unknown)}, which an agent folder must not choose: export it "
            "again, and give such settings with --set"
        )
    try:
        if not use_reward:
            stored.pop("reward", None)
        entries = (stored.get("tools") or []) if use_tools else []
        kept = [entry for entry in entries if not _name_of(entry).startswith(GIVEN_IN_PYTHON)]
        stored["tools"] = entries if only_copied else kept
        _check_inside(stored, folder, files)
        resolved = resolve_paths(stored, files)
        own = dict(zip(_code_places(resolved), _code_places(stored).values(), strict=True))
    except (AttributeError, TypeError, KeyError, ValueError) as fault:
        raise CheckpointError(f"{folder}: agent.json cannot be read ({fault}): export the agent again") from None
    merged = apply_overrides(resolved, overrides)
    if (merged.get("multi_turn") or {}).get("enable") is False:
        merged["tools"] = []
    if only_copied:
        return merged
    for table, key in _reference_places(merged):
        if table[key].startswith(GIVEN_IN_PYTHON):
            what = table[key].removeprefix(GIVEN_IN_PYTHON)
            raise ConfigError(f"{folder} was exported without {what}, its {key}: give it with --set")
    names = [name for place, name in own.items() if place in _code_places(merged)]
    if names and not trust_code:
        raise ConfigError(
            f"{folder} brings code that would run with your permissions: {', '.join(names)}; read it, then give "
            "--trust-code (trust_code=True), or use other tools: --tools (tools=[…])"
        )
    if names:
        log.warning("trust_code is set: code of %s runs with your permissions: %s", folder, ", ".join(names))
    return merged


def unknown_settings(settings: Mapping[str, Any], fields: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of settings outside `fields`, which are nested as in pydantic's `include`."""
    for name, value in settings.items():
        if not (inner := _inner_fields(fields, name)):
            yield f"{prefix}{name}"
        elif inner is not True and isinstance(value, Mapping):
            yield from unknown_settings(value, inner, f"{prefix}{name}.")


def known_settings(settings: Mapping[str, Any], fields: Any) -> dict[str, Any]:
    """A copy of the settings with `fields` only."""
    known = {}
    for name, value in settings.items():
        if inner := _inner_fields(fields, name):
            known[name] = known_settings(value, inner) if inner is not True and isinstance(value, Mapping) else value
    return known


def _inner_fields(fields: Any, name: str) -> Any:
    """What `fields` has under a name: True for everything, False for nothing."""
    return fields.get(name, False) if isinstance(fields, Mapping) else name in fields


def record_settings(folder: Path, config: RunConfig, overrides: Sequence[str] = ()) -> None:
    """Adds the inference settings of a routed agent, which checkpoints of earlier versions do not have, and changes of
    its router's."""
    file = folder / ROUTER_METADATA_FILE
    if file.is_file():
        try:
            metadata = json.loads(file.read_text(encoding="utf-8"))
            own = inference_settings(config)
            metadata = metadata | own if overrides else own | metadata
            changes = [override for override in overrides if override.startswith("router.")]
            metadata["router"] = apply_overrides({"router": metadata.get("router") or {}}, changes)["router"]
        except (ValueError, TypeError, RecursionError) as fault:
            raise CheckpointError(
                f"{file.name} of the checkpoint cannot be read ({fault}): export another checkpoint"
            ) from None
        if config.router.wording not in ("", "silent") and isinstance(metadata.get("router"), dict):
            wording = Path(config.router.wording)
            metadata["router"]["wording"] = f"wording{wording.suffix}"
            if wording.is_file():
                shutil.copyfile(wording, folder / f"wording{wording.suffix}")
        file.write_text(json_text(metadata, indent=2) + "\n", encoding="utf-8")


def brings_code(settings: Mapping[str, Any]) -> bool:
    """Whether asking the agent runs code that its folder names."""
    return bool(_code_places({name: value for name, value in settings.items() if name != "reward"}))


def _code_places(settings: Mapping[str, Any]) -> dict[str, str]:
    """Identity -> description of everything that runs code or starts programs."""
    places: dict[str, str] = {}
    for entry in settings.get("tools") or ():
        table = entry if isinstance(entry, Mapping) else {"name": entry}
        if table["name"] == "mcp":
            target = " ".join(map(str, _as_list(table.get("command")))) or table.get("url")
            places[f"tool {entry!r}"] = f"the MCP server {target!r}"
        elif table["name"] not in DATA_TOOLS:
            places[f"tool {entry!r}"] = f"the tool {table['name']}"
    for table, key in _reference_places(settings):
        if _runs_code(key, str(table[key])):
            places[f"{key} {table[key]}"] = str(table[key])
    return places


def _runs_code(key: str, reference: str) -> bool:
    if key == "function":  # a reward: those of the library run in the sandbox, but the judge sends text to a server
        return reference not in ("env", "tools", "agent") and (
            not reference.startswith("toolwise.") or "judge" in reference
        )
    return ":" in reference or reference.endswith(".py")


def _reference_places(settings: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the settings hold references, besides the tools."""
    env, reward = settings.get("env") or {}, settings.get("reward") or {}
    kwargs = env.get("kwargs") or {}
    tables: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (settings.get("rollout") or {}, ("tool_parser",)),
        (env, ("name", "interaction")),
        (kwargs, ("format_observation", "parse_action", "state_of")),
        (reward, ("function",)),
        *((part, ("function",)) for part in reward.get("parts") or ()),
    ]
    for table, keys in tables:
        yield from ((table, key) for key in keys if isinstance(table.get(key), str) and table[key])


def _check_inside(stored: Mapping[str, Any], folder: Path, files: Path) -> None:
    """Raise if the settings name a file elsewhere: a folder must not choose which of the user's files are read."""
    references = [str(table[key]) for table, key in _reference_places(stored)]
    paths: list[str] = []
    for entry in stored["tools"]:
        table = entry if isinstance(entry, Mapping) else {"name": entry}
        references.append(str(table["name"]))
        if table["name"] == "search":
            paths += [table[key] for key in ("file", "folder", "cache", "wordnet") if isinstance(table.get(key), str)]
    modules = [text if text.endswith(".py") else text.rpartition(":")[0] for text in references]
    paths += [file for file in modules if file.endswith(".py") or "/" in file or file.startswith("~")]
    for path in paths:
        if not is_inside(path, files):
            raise ConfigError(f"{folder} names {path}, which is not in the folder: export the agent again")


def is_inside(path: str, folder: Path) -> bool:
    return not path.startswith("~") and (folder / path).resolve().is_relative_to(folder.resolve())


class _Copies:
    """Copies sources and documents into an agent folder: those of each original folder into a folder of their own."""

    def __init__(self, folder: Path, notify: Notify) -> None:
        self.folder, self.notify = folder, notify
        self._numbers: dict[Path, int] = {}

    def tool(self, entry: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(entry, str):
            return self.reference(entry)
        name = str(entry.get("name", ""))
        table = {key: value for key, value in entry.items() if key not in _MACHINE_OPTIONS.get(name, ())}
        if name == "search":
            for key in ("file", "folder", "wordnet"):
                if isinstance(table.get(key), str):
                    self._documents(table, key)
        return {**table, "name": self.reference(name)}

    def reference(self, reference: str) -> str:
        """A reference to the copy of its file; without its folder if there is no file to copy."""
        file, colon, name = (reference, "", "") if reference.endswith(".py") else reference.rpartition(":")
        if not file.endswith(".py") or reference.startswith(GIVEN_IN_PYTHON):
            return reference
        source = Path(file)
        sources = [source, *imported_siblings(source)] if source.is_file() else []
        if problem := _why_not_copied(source, sources):
            self.notify(f"{source.name} is not part of the export: {problem}; its users must give it with --tools")
            return f"{GIVEN_IN_PYTHON}{source.name}{colon}{name}"
        target = self._place(CODE, source.parent)
        for path in sources:
            self._copy(path, target / path.relative_to(source.parent))
        return f"{(target / source.name).relative_to(self.folder).as_posix()}{colon}{name}"

    def _documents(self, table: dict[str, Any], key: str) -> None:
        source = Path(table[key]).expanduser()
        try:
            files = corpus_files({key: source})
        except ConfigError:
            files = ()
        size = sum(path.stat().st_size for path in files)
        if not files or size > MAX_DATA_BYTES:
            why = f"{size / 1e6:.0f} MB" if files else "not found"
            self.notify(f"search: {source.name} is not part of the export ({why}): give the documents when asking")
            del table[key]
            return
        target = self._place(DOCUMENTS, source if source.is_dir() else source.parent)
        for path in files:
            self._copy(path, target / (path.relative_to(source) if source.is_dir() else path.name))
        copied = target if source.is_dir() else target / source.name
        table[key] = copied.relative_to(self.folder).as_posix()

    def _place(self, kind: str, source: Path) -> Path:
        number = self._numbers.setdefault(source.resolve() / f".{kind}", len(self._numbers))
        return self.folder / kind / str(number)

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _why_not_copied(source: Path, sources: Sequence[Path]) -> str:
    if not sources:
        return "the file is not there"
    for path in sources:
        try:
            secret = find_secret(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as fault:
            return f"{path.name} cannot be read ({type(fault).__name__})"
        if secret is not None:
            return f"{path.name} seems to contain a secret ({secret}); read it from an environment variable instead"
    return ""


def _without_secrets(value: Any, notify: Notify, key: str = "") -> Any:
    """A copy without values that look like secrets; `${NAME}`, an environment variable, stays."""
    if isinstance(value, Mapping):
        public = {str(k): item for k, item in value.items() if _is_public(str(k), item, notify)}
        return {k: _without_secrets(item, notify, k) for k, item in public.items()}
    if isinstance(value, list):
        named = zip(list_names(value, key), value, strict=True)
        return [_without_secrets(item, notify, name) for name, item in named if _is_public(name, item, notify)]
    return value


def _is_public(name: str, value: Any, notify: Notify) -> bool:
    variable = isinstance(value, str) and _VARIABLE.search(value)
    if not (is_secret("", _VARIABLE.sub("", value)) if variable else is_secret(name, value)):
        return True
    notify(f"{name} is not part of the export, since it looks like a secret: use ${{VARIABLE}}")
    return False


def _name_of(entry: Any) -> str:
    return str(entry["name"] if isinstance(entry, Mapping) else entry)


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())
