"""Exports the rollouts of a run for other programs: OpenAI chats, Parquet, SFT conversations, preference pairs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from toolwise.errors import CheckpointError, ConfigError
from toolwise.messages import Message
from toolwise.serialization.files import newest_first
from toolwise.serialization.json_text import json_line, json_text
from toolwise.tools.catalog import read_tools
from toolwise.training.record_filter import Condition, satisfies
from toolwise.training.records import RolloutRecord, read_records
from toolwise.training.rollout_paths import NAME, rollout_files

ExportFormat = Literal["openai", "parquet", "sft", "preferences"]
Rows = Iterator[dict[str, Any]]

_OPENAI_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
"""OpenAI's API knows no other fields of these messages, except a user's `name`: thoughts (`reasoning_content`) are left
out."""


class StepRecords(NamedTuple):
    """The exported rollouts of one step."""

    step: int
    records: list[RolloutRecord]


@dataclass
class ExportResult:
    """What an export wrote, and what it left out."""

    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Why -> how many rollouts, or groups of preferences."""
    has_tools: bool = True
    """Whether the run has a checkpoint, which holds the schemas of its tools."""


def export_rollouts(
    run: Path,
    out: Path,
    form: ExportFormat,
    *,
    where: Sequence[Condition] = (),
    validation: bool = False,
    overwrite: bool = False,
) -> ExportResult:
    """Writes the rollouts in the run's folder that satisfy all conditions to `out`, atomically; to a file that exists
    only with `overwrite`, and never to one of the run."""
    suffix = ".parquet" if form == "parquet" else ".jsonl"
    if out.suffix.lower() != suffix:
        raise ConfigError(f"--out {out}: {form} is written as {suffix}; give the file this suffix")
    if out.exists() and out.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"--out {out} is a file of the run, which would be lost: choose another one")
    if out.exists() and not overwrite:
        raise ConfigError(f"--out {out} exists: choose another file, or replace it with --overwrite (overwrite=True)")
    steps = _read_steps(run, where, validation=validation)
    schemas = run_tools(run)
    result = ExportResult(has_tools=schemas is not None)
    tools = schemas or []
    rows: Mapping[ExportFormat, Callable[[], Rows]] = {
        "openai": lambda: _openai_rows(steps, tools, result),
        "parquet": lambda: _table_rows(steps),
        "sft": lambda: _sft_rows(steps, tools, result),
        "preferences": lambda: _preference_rows(steps, tools, result),
    }
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        result.rows = (_write_parquet if form == "parquet" else _write_jsonl)(temporary, rows[form]())
        if not result.rows:
            raise ConfigError(f"{run}: no rollout is left to export{_reasons(result)}; change --where or the format")
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return result


def run_tools(run: Path) -> list[dict[str, Any]] | None:
    """The schemas of the run's tools, from its latest checkpoint; None without a checkpoint."""
    for checkpoint in newest_first(run / "checkpoints"):
        return list(read_tools(checkpoint / "model").values())
    return None


def _reasons(result: ExportResult) -> str:
    return f" ({describe_skipped(result)})" if result.skipped else ""


def describe_skipped(result: ExportResult) -> str:
    """`3 without a score, 1 …`"""
    return ", ".join(f"{count:,} {reason}" for reason, count in result.skipped.most_common())


def _read_steps(run: Path, where: Sequence[Condition], *, validation: bool) -> Iterator[StepRecords]:
    """One file at a time. Names are checked now, files are read later."""
    kind = "eval" if validation else "step"
    folder = run / "rollouts"
    found = rollout_files(folder, f"{kind}-*")
    files = [(int(match[2]), path) for name, path in found.items() if (match := NAME.fullmatch(name))]
    if not files:
        raise CheckpointError(f"{folder}: has no {kind}-*.jsonl; give the folder of a run that stored its rollouts")

    def steps() -> Iterator[StepRecords]:
        for step, path in files:
            yield StepRecords(step, [record for record in read_records(path) if satisfies(where, step, record)])

    return steps()


def _openai_rows(steps: Iterable[StepRecords], tools: list[dict[str, Any]], result: ExportResult) -> Rows:
    for record in _complete_records(steps, result):
        messages = [_openai_message(message) for message in record.messages]
        yield {"messages": messages, **({"tools": tools} if tools else {})}


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = (*_OPENAI_FIELDS, "name") if message.get("role") == "user" else _OPENAI_FIELDS
    return {name: message.get(name) for name in fields if message.get(name) is not None or name == "content"}


def _sft_rows(steps: Iterable[StepRecords], tools: list[dict[str, Any]], result: ExportResult) -> Rows:
    for record in _complete_records(steps, result):
        if record.score is None:
            result.skipped["without a score"] += 1
        elif _has_malformed_call(record):
            result.skipped["with a tool call that is not JSON"] += 1
        else:
            yield {"messages": list(record.messages), **({"tools": tools} if tools else {})}


def _complete_records(steps: Iterable[StepRecords], result: ExportResult) -> Iterator[RolloutRecord]:
    """Rollouts that the model ended, not a fault of a server or a tool."""
    for record in (record for step in steps for record in step.records):
        if record.infrastructure_fault:
            result.skipped["ended by an infrastructure fault"] += 1
        elif _first_reply(record, [message.get("role") for message in record.messages]) is None:
            result.skipped["without a reply"] += 1
        else:
            yield record


def _has_malformed_call(record: RolloutRecord) -> bool:
    calls = (call for message in record.messages for call in Message.model_validate(message).tool_calls or ())
    return any(isinstance(call.arguments, str) for call in calls)


def _preference_rows(steps: Iterable[StepRecords], tools: list[dict[str, Any]], result: ExportResult) -> Rows:
    """The best against the worst rollout of each group whose scores differ; the first of equal ones."""
    for step in steps:
        groups: dict[str, list[RolloutRecord]] = {}
        for record in _complete_records([step], result):
            if record.score is not None:
                groups.setdefault(record.group_id, []).append(record)
        for group_id, records in groups.items():
            best, worst = max(records, key=_score), min(records, key=_score)
            if best.score == worst.score:
                result.skipped["groups of equal scores"] += 1
                continue
            (prompt, chosen), (other, rejected) = _split(best), _split(worst)
            if prompt != other:
                result.skipped["groups of different prompts"] += 1
                continue
            scores = {"score_chosen": best.score, "score_rejected": worst.score}
            ids = {"task_id": best.task_id, "group_id": group_id, "step": step.step}
            pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            yield {**pair, **({"tools": tools} if tools else {}), **scores, **ids}


def _score(record: RolloutRecord) -> float:
    assert record.score is not None
    return record.score


def _split(record: RolloutRecord) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prompt, as it was before a route changed it, and what follows, from the first reply on."""
    messages = [message.to_openai() for message in record.original_messages]
    first = _first_reply(record, [message["role"] for message in messages])
    return messages[:first], messages[first:]


def _first_reply(record: RolloutRecord, roles: Sequence[Any]) -> int | None:
    """The index of the model's first reply, None without one. Replies are counted from the end, one per step, because a
    prompt may contain assistant messages."""
    said = [index for index, role in enumerate(roles) if role == "assistant"]
    replies = said[max(0, len(said) - len(record.steps)) :]
    return replies[0] if replies else None


def _table_rows(steps: Iterable[StepRecords]) -> Rows:
    """One row per rollout: plain values in columns, everything nested as JSON text."""
    for step in steps:
        for record in step.records:
            row: dict[str, Any] = {"step": step.step}
            for name, kind in _COLUMNS.items():
                value = getattr(record, name)
                row[name] = json_text(value) if kind == "json" else value if kind != "text" else _text(value)
            yield row | {"steps": json_text([step_record.to_json() for step_record in record.steps])}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_COLUMNS: Mapping[str, Literal["text", "number", "boolean", "json"]] = {
    "rollout_id": "text",
    "group_id": "text",
    "task_id": "text",
    "kind": "text",
    "route": "text",
    "data_source": "text",
    "score": "number",
    "correct": "boolean",
    "cost": "number",
    "stop_reason": "text",
    "fault": "text",
    "infrastructure_fault": "boolean",
    "trained_on": "boolean",
    "answered_by": "text",
    "reason": "text",
    "messages": "json",
    "ground_truth": "json",
    "metrics": "json",
    "calls": "json",
    "failed_calls": "json",
    "reward_kwargs": "json",
    "extra_info": "json",
    "error": "json",
    "turn_routes": "json",
    "steps": "json",
}
"""The columns of a Parquet export besides `step`, and what they hold."""


def _write_jsonl(path: Path, rows: Rows) -> int:
    count = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(json_line(row))
            count += 1
    return count


def _write_parquet(path: Path, rows: Rows) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"text": pa.string(), "number": pa.float64(), "boolean": pa.bool_(), "json": pa.string()}
    schema = pa.schema([("step", pa.int64()), *((name, types[kind]) for name, kind in _COLUMNS.items())])
    count = 0
    with path.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            count += 1
            if len(batch) == 1000:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return count
