"""Exports an agent folder or a plain model again: a copy, with other settings or another dtype."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolwise import __version__
from toolwise.agent.export.card import public_name
from toolwise.agent.export.dtype import convert, saved_dtype
from toolwise.agent.export.folder import changes_tools, check_router_settings, load_export
from toolwise.agent.sources import find_agent, is_agent_folder, local_source
from toolwise.models import locate
from toolwise.models.hub import FILES
from toolwise.tools.catalog import build_tools, write_tools
from toolwise.training.agent_bundle import OWN_AGENT, brings_code, record_settings, write_bundle
from toolwise.training.checkpoint.agent_manifest import read_manifest, write_manifest

CARD = "README.md"
_PUBLISHED = (CARD, "LICENSE*", "NOTICE*")
_TEMPLATES = "additional_chat_templates/*.jinja"


def write_copy(
    folder: Path, source: Path, dtype: str | None, overrides: Sequence[str], *, trust_code: bool
) -> tuple[int, str]:
    """Write the agent or model of `source` into the empty `folder`; returns its step and the dtype of its weights."""
    found = Path(local_source(source, overrides))
    # Tools are built only to write their schemas, and only if they are others than before.
    other_tools = changes_tools(overrides)
    copied = {"only_copied": True} if not other_tools else {"trust_code": trust_code}
    config, model = find_agent(found, overrides, use_reward=True, **copied)
    origin = Path(locate(model, config.model.revision if model == config.model.path else ""))
    check_router_settings(overrides, origin)
    for path in _model_files(origin):
        target = folder / path.relative_to(origin)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    record_settings(folder, config, overrides)
    settings = write_bundle(config, folder)
    manifest = read_manifest(found) if is_agent_folder(found) else None
    if manifest is not None and manifest.settings.get(OWN_AGENT):
        settings[OWN_AGENT] = True
    if other_tools:
        write_tools(folder, build_tools(config.tools))
    saved_in = saved_dtype(folder)
    if dtype is not None and dtype != saved_in:
        convert(folder, dtype)
    load_export(folder, config, dtype or saved_in, config.model.base)
    name = manifest.name if manifest is not None else public_name(str(source))
    changes = list(overrides)
    if dtype not in (None, saved_in):
        changes.append(f"weights in {dtype}, converted from {saved_in}")
    _write_card(folder, name, changes, code=brings_code(settings))
    step = manifest.step if manifest is not None else 0
    write_manifest(folder, name, step, settings)
    return step, saved_in


def _model_files(origin: Path) -> Iterator[Path]:
    """The model, its tokenizer, tools and router, and what its publisher wrote: not agent.json and what that names."""
    for pattern in (*FILES, *_PUBLISHED, _TEMPLATES):
        yield from (path for path in sorted(origin.glob(pattern)) if path.is_file() and path.name != "agent.json")


def _write_card(folder: Path, name: str, changes: Sequence[str], *, code: bool) -> None:
    file = folder / CARD
    text = file.read_text(encoding="utf-8").rstrip() if file.is_file() else _new_card(name, code=code)
    if changes:
        text += f"\n\n## Changed\n\nExported again with Toolwise {__version__}:\n\n"
        text += "\n".join(f"- `{' '.join(change.split()).replace('`', '')}`" for change in changes)
    file.write_text(f"{text}\n", encoding="utf-8")


def _new_card(name: str, *, code: bool) -> str:
    trust = " --trust-code" if code else ""
    return (
        f"# {name}\n\nAn agent of the model {name}, which was not trained by Toolwise. Ask it with "
        f'`toolwise run . "What is 3 + 4?"{trust}`; `agent.json` has its tools and settings.'
    )
