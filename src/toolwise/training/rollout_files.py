"""Writes the rollouts of a run: a JSONL file of records per training step, their tokens, and an index of both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.config.records import RecordsConfig
from toolwise.protocols import Callback
from toolwise.serialization.files import write_atomic
from toolwise.serialization.gzip_blocks import compress
from toolwise.serialization.json_text import json_line
from toolwise.training import rollout_index, rollout_paths, token_records
from toolwise.training.records import RolloutRecord
from toolwise.training.vocabulary_file import NAME as VOCABULARY
from toolwise.training.vocabulary_file import VocabularyFile
from toolwise.types import CreditedRollout, ScoredRollout, StepEvent, UpdatedTokens, ValidationEvent

log = logging.getLogger("toolwise.training.rollouts")


class RolloutFiles(Callback):
    """Writes the rollouts of each step and of each validation to RUN/rollouts."""

    def __init__(self, config: RecordsConfig | None = None, tokenizer: Any = None) -> None:
        """`tokenizer`: also store the text of tokens."""
        self.config, self.tokenizer = config or RecordsConfig(), tokenizer
        self._vocabulary: VocabularyFile | None = None

    def on_step(self, event: StepEvent) -> None:
        self._write(event.run_folder, "step", event.step, event.rollouts, event.credited, event.updated)

    def on_validation(self, event: ValidationEvent) -> None:
        self._write(event.run_folder, "eval", event.step, event.rollouts, (), {})

    def _write(
        self,
        run_folder: Path,
        kind: str,
        step: int,
        scored: Sequence[ScoredRollout],
        credited: Sequence[CreditedRollout],
        updated: Mapping[str, UpdatedTokens],
    ) -> None:
        folder = run_folder / "rollouts"
        write_records(folder, f"{kind}-{step:06d}", scored, credited, updated, self.config.token_share)
        if self.config.token_steps is not None:
            token_records.delete_old_tokens(folder, kind, self.config.token_steps)
        if self.config.plain_steps is not None:
            try:
                compress_old_files(folder, kind, self.config.plain_steps)
            except OSError as fault:  # the plain files are there
                log.warning("%s: older rollouts stay uncompressed (records.plain_steps): %s", folder, fault)
        if self.tokenizer is not None and self.config.token_share:
            if self._vocabulary is None:
                self._vocabulary = VocabularyFile(folder / VOCABULARY, self.tokenizer)
            self._vocabulary.add(token for s in scored for step in s.steps for token in step.tokens.token_ids)


def write_records(
    folder: Path,
    name: str,
    scored: Sequence[ScoredRollout],
    credited: Sequence[CreditedRollout],
    updated: Mapping[str, UpdatedTokens] | None = None,
    token_share: float = 1.0,
) -> None:
    """Write `name`.jsonl, its tokens and its index, each atomically, the index last."""
    by_id = {c.rollout.rollout_id: c for c in credited}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    first_rows = token_records.write_tokens(
        rollout_index.token_path(path), scored, by_id, updated or {}, share=token_share
    )
    records = [RolloutRecord.of(s, by_id.get(s.rollout.rollout_id)) for s in scored]
    lines = [json_line(record.to_json()) for record in records]
    rows, offset = [], 0
    for record, line in zip(records, lines, strict=True):
        location = rollout_index.Location(offset, len(line), first_rows.get(record.rollout_id, -1))
        rows.append(rollout_index.try_index_row(record, location))
        offset += len(line)
    write_atomic(path, b"".join(lines))
    rollout_paths.compressed_path(path).unlink(missing_ok=True)
    rollout_index.write_index(path, rows)


def compress_old_files(folder: Path, kind: str, keep: int) -> None:
    """Compress all but the latest `keep` files of training steps ("step") or validations ("eval"). A process that is
    killed meanwhile leaves both files, or an index that is built again."""
    plain = {
        int(match[2]): path
        for path in folder.glob(f"{kind}-*{rollout_paths.LINES}")
        if (match := rollout_paths.NAME.fullmatch(rollout_paths.stem(path)))
    }
    for _, path in sorted(plain.items())[:-keep]:
        index, compressed = rollout_index.read_index(path), rollout_paths.compressed_path(path)
        with path.open("rb") as lines:
            write_atomic(compressed, compress(lines))
        if index is not None:
            rollout_index.save_index(compressed, index)
        path.unlink()
