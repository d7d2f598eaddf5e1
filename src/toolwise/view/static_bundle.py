"""`toolwise view --bundle`: the pages and their data as a folder that a browser opens without a server.

Browsers refuse modules and requests in pages opened from a file, so the modules are joined into one plain script, and
the data is written as scripts that the page loads when it needs them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolwise.errors import ConfigError
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.training.records import RolloutRecord
from toolwise.view.compare_page import compare_page
from toolwise.view.group_page import MAX_SIBLINGS, anchor_page, group_page
from toolwise.view.overview_page import overview_page, series
from toolwise.view.rollout_page import message_view, rollout_page
from toolwise.view.rollout_query import SHOWN, facets, without_keys
from toolwise.view.rollout_store import NotFoundError, RunStore
from toolwise.view.router_page import offered_routes, rollout_routes, run_routes, task_routes
from toolwise.view.view_server import STATIC, Pages

MARK = "toolwise-bundle"
"""In the page of a bundle: such a folder may be written again."""
CHUNK_CHARS = 2_000_000
POLICY = "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data:"
log = logging.getLogger("toolwise.view")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)


def write_bundle(runs: Sequence[Path], out: Path, *, max_rollouts: int = 5000) -> Path:
    """Write the folder; return the path of its page. Of more rollouts, validations and the latest steps are kept.
    Into a new folder it is moved when it is complete; one that exists is written over."""
    _check_folder(out)
    if (out / "index.html").exists():
        _write_bundle(runs, out, max_rollouts)
        return out / "index.html"
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f".{os.getpid()}.tmp"  # inside: a mounted folder is a file system of its own
    try:
        _write_bundle(runs, temporary, max_rollouts)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "index.html"):
            path.rename(out / path.name)
    except BaseException:
        for path in out.iterdir():  # it was empty
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not existed:
            with suppress(OSError):
                out.rmdir()
        raise
    temporary.rmdir()
    return out / "index.html"


def _write_bundle(runs: Sequence[Path], out: Path, max_rollouts: int) -> None:
    pages = Pages([BundledRun(path) for path in runs])
    for name in ("app.css", "icon.svg", "vendor"):
        source = STATIC / name
        shutil.copytree(source, out / name, dirs_exist_ok=True) if source.is_dir() else write_atomic(
            out / name, source.read_bytes()
        )
    shutil.rmtree(out / "data", ignore_errors=True)
    kept = [_kept_files(store, max_rollouts) for store in pages.stores]
    listed = [
        run | {"ended": True, "rollouts": sum(store.of_file(file).num_rows for file in files)}
        for run, store, files in zip(pages.runs({}), pages.stores, kept, strict=True)
    ]
    for number, (store, files) in enumerate(zip(pages.stores, kept, strict=True)):
        _write_run(out, number, store, files)
    _write_data(out, "compare", _comparisons(pages.stores, kept))
    write_atomic(out / "app.js", joined_modules().encode())
    write_atomic(out / "runs.js", f"window.TOOLWISE_BUNDLE = {json_text({'runs': listed})};\n".encode())
    write_atomic(out / "index.html", _page().encode())


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--bundle: {out} is a file; choose a folder")
    page = out / "index.html"
    others = [path for path in out.glob("*") if not re.fullmatch(r"\.\d+\.tmp", path.name)]  # of one that was killed
    if others and not (page.exists() and MARK in page.read_text("utf-8", "replace")):
        raise ConfigError(f"--bundle: {out} is not empty; choose another folder")


def joined_modules(entry: str = "app.js") -> str:
    """The modules in one script, each after those that it imports. Their names must differ: a test checks it."""
    order: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in order or name in above:
            return
        text = (STATIC / "js" / name).read_text("utf-8")
        for imported in _IMPORT.findall(text):
            visit(imported, (*above, name))
        order.append(name)

    visit(entry, ())
    texts = [_IMPORT.sub("", (STATIC / "js" / name).read_text("utf-8")) for name in order]
    body = "\n".join(re.sub(r"^export ", "", text, flags=re.MULTILINE) for text in texts)
    return f'"use strict";\n(() => {{\n{body}}})();\n'


def _page() -> str:
    page = (STATIC / "index.html").read_text("utf-8")
    head = f'<meta name="generator" content="{MARK}">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    page = page.replace("<title>", f"{head}<title>", 1)
    module = '<script type="module" src="js/app.js"></script>'
    return page.replace(module, '<script src="runs.js"></script>\n<script src="app.js"></script>', 1)


def _kept_files(store: RunStore, limit: int) -> list[str]:
    """All validations, then the latest training steps that fit."""
    files, left = store.files(), limit
    kept: list[str] = []
    for file in [f for f in files if f["phase"] != "train"] + [f for f in files if f["phase"] == "train"][::-1]:
        if file["rollouts"] <= left or not kept:
            kept.append(file["file"])
            left -= file["rollouts"]
    return [file["file"] for file in files if file["file"] in kept]


def _write_run(out: Path, number: int, store: RunStore, files: Sequence[str]) -> None:
    overview = overview_page(store)
    names: list[str] = overview["metric_names"]
    curves: dict[str, Any] = {}
    for start in range(0, len(names), 64):
        curves |= series(store, names[start : start + 64])
    known = facets(store) | {"files": [file for file in store.files() if file["file"] in files]}
    routes = run_routes(store)
    _write_data(out, f"{number}/overview", {"overview": overview, "facets": known, "series": curves, "router": routes})
    rows: list[dict[str, Any]] = []
    chunk_of: dict[str, dict[str, int]] = {}
    groups, texts = _Chunks(out, f"{number}/groups"), _Chunks(out, f"{number}/text")
    for file in files:
        table, damaged = store.of_file(file), set[str]()
        for group_id in dict.fromkeys(table["group_id"].to_pylist()):
            members = store.group(file, group_id)
            try:
                offered = offered_routes([store.record(row) for row in members], routes["names"])
            except NotFoundError as fault:
                log.warning("left out of the bundle: group %s: %s", group_id, fault)
                damaged.add(group_id)
                continue
            tasks = {row["task_id"] for row in members}
            data = {
                "group": group_page(store, file, group_id),
                "anchors": anchor_page(store, file, group_id),
                "routes": {task: task_routes(store, task, file, offered) for task in tasks},
                "rollouts": {row["rollout_id"]: _rollout_data(store, row, routes["names"]) for row in members},
            }
            chunk_of.setdefault(file, {})[group_id] = groups.add(group_id, data)
            for row in members:
                line = without_keys(json_text(store.record(row).to_json())).lower()
                texts.add(f"{file} {row['rollout_id']}", line)
        rows += [row for row in table.select(list(SHOWN)).to_pylist() if row["group_id"] not in damaged]
    groups.flush()
    texts.flush()
    _write_data(out, f"{number}/rows", {"rows": rows, "groups": chunk_of, "chunks": texts.number})


class BundledRun(RunStore):
    """Keeps the rollouts of a group: several pages show them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._records: dict[tuple[str, int], RolloutRecord] = {}

    def records(self, rows: Iterable[dict[str, Any]]) -> Iterator[RolloutRecord]:
        for row in rows:
            key = row["file"], row["offset"]
            if key not in self._records:
                if len(self._records) >= MAX_SIBLINGS:
                    self._records.clear()
                self._records[key] = next(super().records([row]))
            yield self._records[key]


def _rollout_data(store: RunStore, row: dict[str, Any], routes: Sequence[str]) -> dict[str, Any]:
    """What the pages of one rollout show, with the whole text of messages that are cut at first."""
    page, record = rollout_page(store, row["file"], row["rollout_id"]), store.record(row)
    full = {
        index: message_view(message, limit=None)
        for index, message in enumerate(record.messages)
        if any(isinstance(text, dict) for text in _view_texts(page["messages"][index]))
    }
    return {"rollout": page, "router": rollout_routes(record, routes), "full": full}


def _view_texts(message: Mapping[str, Any]) -> list[Any]:
    """The texts of a message's view; one that is cut is an object."""
    return [message["text"], message["thought"], *(call["arguments"] for call in message["calls"])]


def _comparisons(stores: Sequence[RunStore], kept: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Of the first validation of each run with the last of each."""
    found = {}
    for a, first in enumerate(stores):
        for b, second in enumerate(stores):
            before, after = ([f for f in kept[i] if f.startswith("eval-")] for i in (a, b))
            for one, other in {(before[0], after[-1]), (before[-1], after[-1])} if before and after else ():
                found[f"{a}|{one}|{b}|{other}"] = compare_page(first, one, second, other)
    return found


class _Chunks:
    """Entries of an object, in scripts of bounded size."""

    def __init__(self, out: Path, name: str) -> None:
        self.out, self.name, self.number = out, name, 0
        self._entries: list[str] = []
        self._chars = 0

    def add(self, key: str, value: Any) -> int:
        """The number of the script that has it."""
        if self._chars > CHUNK_CHARS:
            self.flush()
        entry = f"{json_text(key)}:{json_text(value)}"
        self._entries.append(entry)
        self._chars += len(entry)
        return self.number

    def flush(self) -> None:
        if self._entries:
            _write_script(self.out, f"{self.name}-{self.number}", "{" + ",".join(self._entries) + "}")
            self.number += 1
            self._entries, self._chars = [], 0


def _write_data(out: Path, name: str, value: Any) -> None:
    _write_script(out, name, json_text(value))


def _write_script(out: Path, name: str, text: str) -> None:
    write_atomic(out / "data" / f"{name}.js", f"TOOLWISE_DATA({json_text(name)}, {text});\n".encode())
