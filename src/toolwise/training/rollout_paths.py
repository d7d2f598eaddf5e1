"""Where the rollouts of a run are: `step-000001.jsonl` and `eval-000001.jsonl`, those of older steps as `.jsonl.gz`."""

from __future__ import annotations

import re
from pathlib import Path

from toolwise.serialization.gzip_blocks import SUFFIX as GZIP

LINES = ".jsonl"
NAME = re.compile(r"(step|eval)-(\d{6,})")


def stem(path: Path) -> str:
    """`step-000001`, compressed or not."""
    return path.name.removesuffix(GZIP).removesuffix(LINES)


def plain_path(path: Path) -> Path:
    return path.with_name(stem(path) + LINES)


def compressed_path(path: Path) -> Path:
    return path.with_name(stem(path) + LINES + GZIP)


def existing_path(path: Path) -> Path:
    """The file, or its compressed version."""
    return path if path.exists() else compressed_path(path)


def rollout_file(folder: Path, name: str) -> Path | None:
    """The file of a name such as `step-000001`; None if there is none. A pipe or a device, which could be read
    forever, is none."""
    plain = folder / f"{name}{LINES}"
    return next((path for path in (plain, compressed_path(plain)) if path.is_file()), None)


def rollout_files(folder: Path, pattern: str) -> dict[str, Path]:
    """Files whose name matches, such as `step-*`, by name and in order; the plain one where a process was killed
    between writing the compressed one and deleting it. One that is being compressed is never missing."""
    plain = {stem(path): path for path in folder.glob(pattern + LINES)}  # first: it goes when the other is there
    compressed = {stem(path): path for path in folder.glob(pattern + LINES + GZIP)}
    return dict(sorted((compressed | plain).items()))
