"""Tokens of stored rollouts: ids, log-probs, advantages and their parts, in compressed Parquet files.

One row per step of a rollout. Most of a prompt repeats the row before it (the same conversation, one turn earlier, or
the same prompt of the next rollout), so a row stores how many leading ids it shares with it, and the rest. Row groups
can be read alone: their first row shares nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import valid_text
from toolwise.types import CreditedRollout, ScoredRollout, StepData, UpdatedTokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUFFIX = ".tokens.parquet"
ROLLOUTS_PER_GROUP = 32
"""In a row group: what is read to show one rollout."""
PART, FACTOR = "part/", "factor/"
"""Prefixes of the columns of `AdvantageParts`."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The stored tokens of one step; arrays have one entry per sampled token, None where nothing is known."""

    rollout_id: str
    step: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    prompt_ids: NDArray[np.int32] | None = None
    versions: NDArray[np.int32] | None = None
    advantages: NDArray[np.float32] | None = None
    gaps: NDArray[np.float16] | None = None
    entropies: NDArray[np.float16] | None = None
    clipped: NDArray[np.bool_] | None = None
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    factors: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


def keeps_tokens(group_id: str, share: float) -> bool:
    """Whether a group is among the `share` whose tokens are stored; the same in every process."""
    digest = hashlib.blake2b(group_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def write_tokens(
    path: Path,
    scored: Sequence[ScoredRollout],
    credited: Mapping[str, CreditedRollout],
    updated: Mapping[str, UpdatedTokens],
    share: float = 1.0,
) -> dict[str, int]:
    """Write the tokens of rollouts that have any; return the first row of each. If there is none, there is no file
    afterwards: one of a killed attempt would belong to other rollouts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kept = [s for s in scored if keeps_tokens(s.rollout.group_id, share) and any(t.tokens.has_ids for t in s.steps)]
    if not kept:
        path.unlink(missing_ok=True)
        return {}
    names = _part_names([credited[s.rollout.rollout_id] for s in kept if s.rollout.rollout_id in credited])
    buffer, writer, rows, first_rows = pa.BufferOutputStream(), None, 0, {}
    for start in range(0, len(kept), ROLLOUTS_PER_GROUP):
        columns = _Columns(names)
        for s in kept[start : start + ROLLOUTS_PER_GROUP]:
            name = s.rollout.rollout_id
            first_rows[name] = rows + len(columns.steps)
            columns.add(s, credited.get(name), updated.get(name))
        table = columns.table()
        rows += len(table)
        if writer is None:
            writer = pq.ParquetWriter(buffer, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None  # `kept` is not empty
    writer.close()
    write_atomic(path, buffer.getvalue().to_pybytes())
    return first_rows


def read_tokens(path: Path, first_row: int = 0, rows: int | None = None, *, prompts: bool = True) -> list[StepTokens]:
    """`rows` rows from `first_row` on; reads only the row groups that hold them, without prompts if not `prompts`."""
    import pyarrow.parquet as pq

    result: list[StepTokens] = []
    with pq.ParquetFile(path) as file:
        last, start = (file.metadata.num_rows if rows is None else first_row + rows), 0
        columns = [name for name in file.schema_arrow.names if prompts or name not in ("shared", "prompt_ids")]
        for group in range(file.metadata.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if start < last and end > first_row:
                of_group = list(_rows_of(file.read_row_group(group, columns=columns)))
                result += of_group[max(0, first_row - start) : last - start]
            start = end
    return result


def row_group_starts(path: Path) -> list[int]:
    """The first row of each row group, and the number of rows at the end."""
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return list(itertools.accumulate(counts, initial=0))


def delete_old_tokens(folder: Path, kind: str, keep: int) -> None:
    """Delete all but the latest `keep` token files of training steps ("step") or validations ("eval")."""
    for path in sorted(folder.glob(f"{kind}-*{SUFFIX}"))[:-keep]:
        path.unlink()


def _part_names(credited: Sequence[CreditedRollout]) -> list[str]:
    found: dict[str, None] = {}
    for parts in (c.parts for c in credited if c.parts is not None):
        found |= dict.fromkeys(PART + name for name in parts.parts)
        found |= dict.fromkeys(FACTOR + name for name in parts.factors)
    return list(found)


class _Columns:
    """The rows of one row group."""

    def __init__(self, part_names: Sequence[str]) -> None:
        self.part_names = part_names
        self.rollout_ids: list[str] = []
        self.steps: list[int] = []
        self.shared: list[int] = []
        self.lists: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "token_ids", "logprobs", "versions", "advantages", "gaps", "entropies")
        } | {"clipped": [], **{name: [] for name in part_names}}
        self._before: Any = None

    def add(self, scored: ScoredRollout, credited: CreditedRollout | None, updated: UpdatedTokens | None) -> None:
        import numpy as np

        end = 0
        parts = None if credited is None else credited.parts
        for index, step in enumerate(scored.steps):
            start, end = end, end + len(step.tokens.token_ids)
            if not step.tokens.has_ids:
                continue
            self._add_ids(scored.rollout.rollout_id, step)
            self.lists["advantages"].append(None if credited is None else credited.advantages[index])
            for name in ("gaps", "entropies", "clipped"):
                self.lists[name].append(None if updated is None else getattr(updated, name)[start:end])
            for name in self.part_names:
                source = {} if parts is None else parts.parts if name.startswith(PART) else parts.factors
                values = source.get(name.partition("/")[2])
                if values is None and parts is not None:  # a part that other rollouts have
                    values = np.full(end, 0.0 if name.startswith(PART) else 1.0)
                self.lists[name].append(None if values is None else values[start:end])

    def _add_ids(self, rollout_id: str, step: StepData) -> None:
        import numpy as np

        tokens = step.tokens
        prompt, sampled = (np.array(list(ids), dtype=np.int32) for ids in (tokens.prompt_ids, tokens.token_ids))
        shared = 0 if self._before is None else _common_prefix(self._before, prompt)
        self._before = np.concatenate([prompt, sampled])
        self.rollout_ids.append(valid_text(rollout_id))
        self.steps.append(step.system_step_index)
        self.shared.append(shared)
        self.lists["prompt_ids"].append(prompt[shared:])
        self.lists["token_ids"].append(sampled)
        self.lists["logprobs"].append(np.asarray(tokens.logprobs, dtype=np.float32))
        version = -1 if tokens.policy_version is None else tokens.policy_version
        self.lists["versions"].append(
            np.full(len(sampled), version, np.int32)
            if tokens.token_versions is None
            else np.asarray(tokens.token_versions, dtype=np.int32)
        )

    def table(self) -> Any:
        import numpy as np
        import pyarrow as pa

        types = {name: pa.float64() for name in self.part_names} | {
            "prompt_ids": pa.int32(),
            "token_ids": pa.int32(),
            "logprobs": pa.float32(),
            "versions": pa.int32(),
            "advantages": pa.float32(),
            "gaps": pa.float16(),
            "entropies": pa.float16(),
            "clipped": pa.bool_(),
        }
        columns: dict[str, Any] = {
            "rollout_id": pa.array(self.rollout_ids, pa.string()).dictionary_encode(),
            "step": pa.array(self.steps, pa.int32()),
            "shared": pa.array(self.shared, pa.int32()),
        }
        for name, arrays in self.lists.items():
            offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)]).astype(np.int32)
            present = [array for array in arrays if array is not None]
            flat: Any = np.concatenate(present).astype(types[name].to_pandas_dtype()) if present else []
            missing = pa.array([array is None for array in arrays], pa.bool_())
            columns[name] = pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(flat, types[name]), mask=missing if missing.true_count else None
            )
        return pa.table(columns)


def _common_prefix(first: Any, second: Any) -> int:
    import numpy as np

    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _rows_of(table: Any) -> Iterator[StepTokens]:
    import numpy as np

    def cell(name: str, row: int) -> Any:
        if name not in table.column_names or not table[name][row].is_valid:
            return None
        return table[name][row].values.to_numpy(zero_copy_only=False)

    before: Any = None
    parts, factors = ([n for n in table.column_names if n.startswith(prefix)] for prefix in (PART, FACTOR))
    for row in range(len(table)):
        prompt, sampled = cell("prompt_ids", row), cell("token_ids", row)
        if prompt is not None:
            shared = table["shared"][row].as_py()
            prompt = np.concatenate([before[:shared], prompt]) if shared else prompt
            before = np.concatenate([prompt, sampled])
        own = {name: cell(name, row) for name in (*parts, *factors)}
        yield StepTokens(
            rollout_id=table["rollout_id"][row].as_py(),
            step=table["step"][row].as_py(),
            token_ids=sampled,
            logprobs=cell("logprobs", row),
            prompt_ids=prompt,
            versions=cell("versions", row),
            advantages=cell("advantages", row),
            gaps=cell("gaps", row),
            entropies=cell("entropies", row),
            clipped=cell("clipped", row),
            parts={name.removeprefix(PART): own[name] for name in parts if own[name] is not None},
            factors={name.removeprefix(FACTOR): own[name] for name in factors if own[name] is not None},
        )


def read_old_tokens(path: Path, rollout_id: str) -> list[StepTokens]:
    """Ids and log-probs of a rollout from the safetensors file that earlier versions wrote."""
    from safetensors import safe_open

    found = []
    with safe_open(path, framework="np") as file:
        steps = json.loads((file.metadata() or {}).get("steps", "[]"))
        offsets, ids, logprobs = (file.get_slice(name) for name in ("token_ids.offsets", "token_ids", "logprobs"))
        for index, (name, step) in enumerate(steps):
            if name == rollout_id:
                start, end = (int(value) for value in offsets[index : index + 2])
                found.append(StepTokens(rollout_id, int(step), ids[start:end], logprobs[start:end]))
    return found
