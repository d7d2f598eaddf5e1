"""Filters, sorting and text search over the index of a run's rollouts."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from toolwise.errors import ToolwiseError
from toolwise.serialization.gzip_blocks import DAMAGES, open_text
from toolwise.training.records import RolloutRecord
from toolwise.training.rollout_index import MAX_LINE_BYTES
from toolwise.view.rollout_store import NotFoundError, RunStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

log = logging.getLogger("toolwise.view")

WORDS = ("phase", "file", "kind", "route", "stop_reason", "task_id", "group_id", "answered_by")
FLAGS = ("correct", "trained_on", "fault", "thinking")
NUMBERS = ("step", "score", "cost", "advantage", "steps", "tokens", "calls", "failed_calls")
SORTABLE = (*WORDS, *FLAGS, *NUMBERS, "rollout_id", "question")
SHOWN = (
    *("file", "phase", "step", "rollout_id", "group_id", "task_id", "kind", "route", "question", "score", "correct"),
    *("cost", "advantage", "steps", "tokens", "calls", "failed_calls", "tools", "stop_reason", "fault", "trained_on"),
)
REWARD = "reward/"
MAX_ROWS = 500
MAX_POINTS = 4000
CHUNK_BYTES = 4_000_000
KEYS = (
    *(f.name for f in fields(RolloutRecord)),
    *("role", "content", "tool_calls", "tool_call_id", "function", "name", "arguments", "type", "reasoning_content"),
    *("advantage", "base_reward", "tokens", "return_to_go", "anchor", "log_prob", "logits", "kind", "message"),
    *("traceback", "level", "levels", "thought", "action_logprob", "action_entropy", "step", "id"),
)
"""Names of fields in a stored line, which are not its text."""


def without_keys(line: str) -> str:
    """A stored line without the names of its fields: what a text search looks at."""
    return re.sub('"(?:' + "|".join(map(re.escape, dict.fromkeys(KEYS))) + ')":', "\n", line)


class QueryError(ToolwiseError):
    """A filter that does not exist, or a value that does not fit."""


@dataclass(frozen=True, slots=True)
class Query:
    """`words` and `flags`: column -> accepted values; `ranges`: column -> bounds, None: none; `tool`: one that was
    called; `text`: occurs in the messages or another field, in any case of ASCII letters."""

    words: Mapping[str, frozenset[str]]
    flags: Mapping[str, bool]
    ranges: Mapping[str, tuple[float | None, float | None]]
    tool: str = ""
    text: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        """From the parameters of a link: `kind=lookup|known`, `correct=true`, `score_min=0.5`, `tool=`, `q=`."""
        words = {
            name: frozenset([parameters[name], *parameters[name].split("|")])  # a kind may have a bar in its name
            for name in WORDS
            if parameters.get(name)
        }
        flags = {name: parameters[name] == "true" for name in FLAGS if parameters.get(name)}
        ranges = {
            name: bounds
            for name in NUMBERS
            if (bounds := tuple(_bound(parameters, f"{name}_{end}") for end in ("min", "max"))) != (None, None)
        }
        return cls(words, flags, ranges, parameters.get("tool", ""), parameters.get("q", ""))  # type: ignore[arg-type]


def _bound(parameters: Mapping[str, str], name: str) -> float | None:
    text = parameters.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise QueryError(f"{name} is {text!r:.40}; give a number") from None


def select(store: RunStore, query: Query) -> Mask:
    """Which rollouts fit. The text is searched last, in the files that still have rollouts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    table = store.table
    mask = np.ones(table.num_rows, dtype=bool)

    def keep(condition: Any) -> None:
        array = condition.combine_chunks() if isinstance(condition, pa.ChunkedArray) else condition
        mask[:] &= pc.fill_null(array, False).to_numpy(zero_copy_only=False)

    for name, values in query.words.items():
        keep(pc.is_in(table[name], pa.array(sorted(values), pa.string())))
    for name, flag in query.flags.items():
        keep(pc.equal(table[name], flag))
    for name, (low, high) in query.ranges.items():
        if low is not None:
            keep(pc.greater_equal(table[name], low))
        if high is not None:
            keep(pc.less_equal(table[name], high))
    if query.tool:
        mask &= _calls_tool(table, query.tool)
    if query.text:
        mask &= search_text(store, query.text, mask)
    return mask


def _calls_tool(table: Any, tool: str) -> Mask:
    import numpy as np
    import pyarrow.compute as pc

    tools = table["tools"].combine_chunks()
    called = pc.equal(pc.list_flatten(tools), tool).to_numpy(zero_copy_only=False)
    parents = pc.list_parent_indices(tools).to_numpy(zero_copy_only=False)
    mask = np.zeros(table.num_rows, dtype=bool)
    mask[parents[called]] = True
    return mask


def sorted_rows(store: RunStore, mask: Mask, sort: str, *, descending: bool) -> Any:
    """Indices of the selected rollouts in order; equal ones, and those without a value, keep the order of the run."""
    import numpy as np
    import pyarrow.compute as pc

    indices = np.flatnonzero(mask)
    if not sort or sort not in SORTABLE:
        return indices[::-1] if descending else indices
    order = "descending" if descending else "ascending"
    column = store.table.select([sort]).take(indices)
    return indices[pc.sort_indices(column, [(sort, order)]).to_numpy()]


def page_of_rows(store: RunStore, parameters: Mapping[str, str]) -> dict[str, Any]:
    """One page of the table, and how many rollouts fit in all."""
    mask = select(store, Query.of(parameters))
    rows = sorted_rows(store, mask, parameters.get("sort", ""), descending=parameters.get("desc") == "true")
    offset, limit = (_integer(parameters, name, default) for name, default in (("offset", 0), ("limit", 50)))
    shown = store.table.select(list(SHOWN)).take(rows[offset : offset + min(limit, MAX_ROWS)])
    return {"total": len(rows), "of": store.table.num_rows, "offset": offset, "rows": shown.to_pylist()}


def points(store: RunStore, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Two columns of the rollouts that fit, evenly thinned out if there are too many. `reward/NAME` is what the reward
    reported as NAME, read from the stored lines of those that are shown."""
    import numpy as np

    names = parameters.get("x", "step"), parameters.get("y", "score")
    for name in names:
        if name not in NUMBERS and not name.startswith(REWARD):
            raise QueryError(f"{name!r:.40} is not a column of numbers; choose one of {', '.join(NUMBERS)}")
    indices = np.flatnonzero(select(store, Query.of(parameters)))
    total = len(indices)
    if total > MAX_POINTS:
        indices = indices[np.linspace(0, total - 1, MAX_POINTS).astype(int)]
    columns = dict.fromkeys([*(name for name in names if name in NUMBERS), "file", "rollout_id", "correct"])
    found = store.table.select(list(columns)).take(indices).to_pydict()
    reported = [name for name in dict.fromkeys(names) if name not in NUMBERS]
    if reported:
        rows = store.table.select(["file", "rollout_id", "offset", "length"]).take(indices).to_pylist()
        metrics = _reward_metrics_of(store, rows)
        found |= {name: [_metric(of, name.removeprefix(REWARD)) for of in metrics] for name in reported}
    return {"total": total, "x": names[0], "y": names[1], "points": found}


def _reward_metrics_of(store: RunStore, rows: Iterable[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """What the reward reported for each; nothing for those of a file that cannot be read."""
    found: list[Mapping[str, Any]] = []
    for _, group in groupby(rows, key=itemgetter("file")):
        members = list(group)
        try:
            found += [record.metrics for record in store.records(members)]
        except NotFoundError as fault:
            log.warning("%s", fault)
            found += [{}] * len(members)
    return found


def _metric(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def reward_metrics(store: RunStore) -> list[str]:
    """What the reward reported beside the score, as columns of a scatter plot."""
    names = (re.fullmatch(r"(reward/[^/]+)/mean", name) for name in store.folder.metric_names)
    return sorted({match[1] for match in names if match})


def facets(store: RunStore) -> dict[str, Any]:
    """The values that there are to choose from: words with their counts, tools, and the range of each number."""
    import pyarrow.compute as pc

    words = {}
    for name in ("phase", "kind", "route", "stop_reason"):
        counts = pc.value_counts(store.table[name].combine_chunks()).to_pylist()
        known = [(entry["values"], entry["counts"]) for entry in counts if entry["values"] is not None]
        words[name] = sorted(known, key=lambda entry: -entry[1])[:100]
    tools = pc.value_counts(pc.list_flatten(store.table["tools"].combine_chunks())).to_pylist()
    ranges = {name: pc.min_max(store.table[name]).as_py() for name in NUMBERS}
    called = sorted(((entry["values"], entry["counts"]) for entry in tools), key=lambda entry: -entry[1])
    return {"words": words, "tools": called[:100], "ranges": ranges, "files": store.files()} | {
        "reward_metrics": reward_metrics(store)
    }


def _integer(parameters: Mapping[str, str], name: str, default: int) -> int:
    text = parameters.get(name, "")
    if text and not re.fullmatch(r"\d{1,9}", text):
        raise QueryError(f"{name} is {text!r:.40}; give a number")
    return int(text) if text else default


def search_text(store: RunStore, text: str, among: Mask) -> Mask:
    """Which rollouts have `text` in a value of their stored line, among those given. ASCII letters match in both
    cases, as `bytes.lower` knows no others."""
    import numpy as np

    found = np.zeros(len(among), dtype=bool)
    needle = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "backslashreplace").lower()
    keys = [key.encode() for key in dict.fromkeys(KEYS) if needle in key.encode()]
    files = store.table["file"].to_numpy(zero_copy_only=False)
    offsets = store.table["offset"].to_numpy()
    ends = offsets + store.table["length"].to_numpy()
    if not len(files):  # of a run that has just begun
        return found
    starts = np.flatnonzero(np.append(True, files[1:] != files[:-1]))
    for start, end in zip(starts, [*starts[1:], len(files)], strict=True):
        if not among[start:end].any():
            continue
        for position, chunk in _chunks(store, str(files[start])):
            hits = _positions(needle, chunk)
            if keys and len(hits):
                hits = _outside_keys(hits, chunk, keys)
            if len(hits):
                rows = np.searchsorted(offsets[start:end], hits + position, side="right") - 1
                inside = (rows >= 0) & (hits + position < ends[start + rows])  # not in a line that is left out
                found[start + rows[inside]] = True
    return found


def _chunks(store: RunStore, file: str) -> Any:
    """Position and lower-case text of blocks of whole lines."""
    position = 0
    try:
        with open_text(store.path_of(file)) as lines:
            while chunk := lines.read1(CHUNK_BYTES):  # of a compressed file one block
                if not chunk.endswith(b"\n"):
                    chunk += lines.readline(MAX_LINE_BYTES)
                yield position, chunk.lower()
                position += len(chunk)
    except DAMAGES as fault:  # other files are searched all the same
        log.warning("%s of %s is damaged: %s", file, store.name, fault)


def _positions(needle: bytes, chunk: bytes) -> Any:
    import numpy as np

    return np.fromiter((match.start() for match in re.finditer(re.escape(needle), chunk)), dtype=np.int64)


def _outside_keys(hits: Any, chunk: bytes, keys: list[bytes]) -> Any:
    """The hits that do not lie in the name of a field."""
    import numpy as np

    names = re.finditer(rb'"(?:' + b"|".join(map(re.escape, keys)) + rb')":', chunk)
    spans = np.array([(match.start(), match.end()) for match in names], dtype=np.int64).reshape(-1, 2)
    if not len(spans):
        return hits
    before = np.searchsorted(spans[:, 0], hits, side="right") - 1
    return hits[(before < 0) | (hits >= spans[before, 1])]
