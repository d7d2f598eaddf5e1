"""Optimiser state on the disk, in parts: each learner writes the values that it owns as one safetensors file, and the
manifest comes last. A part is a range of a flattened tensor, so any other number of learners can read its own ranges.
Nothing is gathered, nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolwise.errors import CheckpointError
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text

MANIFEST = "learners.json"


@dataclass(frozen=True, slots=True)
class Part:
    """The values [start, start + len(values)) of a flattened tensor of `total` values."""

    values: Tensor
    start: int
    total: int


def own_range(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The range that a rank writes of a tensor that all ranks hold."""
    return total * rank // ranks, total * (rank + 1) // ranks


def write_parts(folder: Path, rank: int, ranks: int, parts: Mapping[str, Part]) -> None:
    """Write this rank's file. The values must not change meanwhile."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    ranges = {name: f"{part.start}:{part.start + len(part.values)}:{part.total}" for name, part in parts.items()}
    save_file(
        {name: part.values.contiguous() for name, part in parts.items() if len(part.values)},
        folder / file_name(rank, ranks),
        metadata={"ranges": json.dumps(ranges, allow_nan=False)},
    )


def write_manifest(folder: Path, ranks: int, facts: Mapping[str, Any]) -> None:
    """After all parts are there."""
    missing = [rank for rank in range(ranks) if not (folder / file_name(rank, ranks)).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: learners {missing} of {ranks} wrote nothing here: the run folder must be on a disk that all "
            "learners share"
        )
    write_atomic(folder / MANIFEST, json_text({"ranks": ranks, **facts}).encode())


def file_name(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


class PartReader:
    """Reads ranges of what any number of learners wrote to `folder`."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        try:
            self.facts: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
            ranks = int(self.facts["ranks"])
            paths = [folder / file_name(rank, ranks) for rank in range(ranks)]
            self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        except (OSError, ValueError, KeyError) as fault:
            raise CheckpointError(f"{folder}: the learners' state cannot be read ({fault})") from fault
        self._ranges: list[dict[str, tuple[int, int, int]]] = [
            {name: _range(text) for name, text in json.loads(file.metadata()["ranges"]).items()} for file in self._files
        ]

    @property
    def names(self) -> set[str]:
        return set(self._ranges[0])

    def total(self, name: str) -> int:
        return self._ranges[0][name][2]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The values [start, stop)."""
        pieces: list[Tensor] = []
        at = start
        for file, ranges in sorted(zip(self._files, self._ranges, strict=True), key=lambda pair: pair[1][name][0]):
            begin, end, _ = ranges[name]
            if begin <= at < min(end, stop):
                upto = min(end, stop)
                pieces.append(file.get_slice(name)[at - begin : upto - begin])
                at = upto
        if at < stop:
            raise CheckpointError(f"the learners' state lacks {name}[{at}:{stop}]")
        return torch.cat(pieces) if pieces else torch.zeros(0)


def _range(text: str) -> tuple[int, int, int]:
    start, stop, total = map(int, text.split(":"))
    return start, stop, total
