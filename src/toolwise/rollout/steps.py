"""Save and load steps as JSON lines. They read back equal, except that shared memory and packed arrays are lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from toolwise.errors import DataError
from toolwise.types import StepData


def save_steps(path: str | Path, steps: Iterable[StepData]) -> None:
    """One step per line."""
    lines = "".join(f"{step.model_dump_json()}\n" for step in steps)
    Path(path).write_text(lines, encoding="utf-8")


def load_steps(path: str | Path) -> Sequence[StepData]:
    steps = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                steps.append(StepData.model_validate_json(line))
            except ValidationError as fault:
                first = fault.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise DataError(
                    f"{path}, line {number}: {where}: {first['msg']}; was this file written by save_steps?"
                ) from None
    return steps
