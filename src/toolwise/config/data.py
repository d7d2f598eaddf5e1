"""The settings of a run's data: its task files, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.loader import Section


class DataSource(Section):
    """A file or a glob among several."""

    path: Path
    """A task file, or a glob such as "a/*.parquet"."""
    weight: PositiveFloat | None = None
    """Its share of the training tasks that are drawn, relative to the other sources; all of them have one, or none."""


TaskSources = Path | list[Path | DataSource]
"""One task file or glob, or several."""


class DataConfig(Section):
    train: TaskSources | None = None
    """Training tasks: a Parquet or JSONL file, a glob, or a list of files, globs and tables {path, weight}."""
    val: TaskSources | None = None
    """Held-out validation tasks, never trained on: a file, a glob, or a list of them."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column of the files holds which field, such as { prompt = "question", ground_truth = "answer" }; fields
    that are not named are read from the column of their own name."""
    system_prompt: str = ""
    """System message of every prompt that does not begin with one; the trained agent gives it to its questions too."""
    batch_size: PositiveInt = 16
    """Tasks per step."""
    shuffle: bool = True
    """Shuffle the tasks in every epoch."""
    drop_last: bool = True
    """Drop the last, incomplete batch of an epoch."""
    limit: PositiveInt | None = None
    """Use only the first `limit` training rows; of each source, if sources have weights."""
    val_limit: PositiveInt | None = None
    """Use only the first `val_limit` validation rows."""
    sampler: str = ""
    """Which tasks come next: "uniform", "difficulty", "mixture", or a sampler of your own as package.module:Name or
    path/to/file.py:Name (docs/curriculum.md). Empty: every epoch is a permutation (`shuffle`, `drop_last`)."""
    sampler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the sampler."""
    cache: Path | None = None
    """Folder for converted copies of large task files (docs/data.md); unset: `.data-cache` beside the run's folder."""

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        for name, sources in (("train", self.train), ("val", self.val)):
            if isinstance(sources, list) and not sources:
                raise ValueError(f"data.{name} is an empty list: name at least one file, or leave it out")
        weights = source_weights(self.train)
        if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
            raise ValueError("data.train: some sources have a weight and some have none: give each a weight, or none")
        if any(weight is not None for weight in source_weights(self.val)):
            raise ValueError("data.val: weights apply to data.train only, validation uses every task once: remove them")
        return self


def source_paths(sources: TaskSources | None) -> list[Path]:
    """The files and globs in a setting, in order."""
    if sources is None:
        return []
    entries = sources if isinstance(sources, list) else [sources]
    return [entry.path if isinstance(entry, DataSource) else entry for entry in entries]


def source_weights(sources: TaskSources | None) -> list[float | None]:
    """The weight of each of `source_paths`."""
    if not isinstance(sources, list):
        return [None] * len(source_paths(sources))
    return [entry.weight if isinstance(entry, DataSource) else None for entry in sources]
