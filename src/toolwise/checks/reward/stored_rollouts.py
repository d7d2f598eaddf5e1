"""Reads stored rollouts back in the form in which the training loop passes them to a reward, and scores them with the
same calls as in training.

They come from a run folder, one of its files, or any rows with `messages` and `ground_truth`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolwise.data.files import Row, read_rows, row_error
from toolwise.errors import CheckpointError, DataError
from toolwise.messages import Message
from toolwise.rewards.function import Mode
from toolwise.serialization.gzip_blocks import SUFFIX as GZIP
from toolwise.training.evaluate import Scoring
from toolwise.training.records import RolloutRecord
from toolwise.training.rollout_paths import compressed_path, rollout_files, stem
from toolwise.training.trackers.jsonl import read_metrics
from toolwise.types import EvaluateResult, Rollout, StepData, StopReason, Task, Usage

_NON_ARGUMENT_COLUMNS = frozenset(
    {"messages", "ground_truth", "gold", "prompt", "task_id", "group_id", "rollout_id", "step", "steps", "score"}
    | {"metrics", "reason", "error", "reward_kwargs", "reward_model", "data_source", "ability", "extra_info"}
    | {"prompt_length"}
)
"""Columns of user files that are not keyword arguments of the reward."""
_STEP_IN_NAME = re.compile(r"(?:step|eval)-(\d+)")
MAX_TIMEOUTS, MAX_TIMEOUT_SHARE = 3, 0.1
"""A pass stops once this number and this share of calls have timed out: each hanging call costs a full deadline."""
_MAX_CHUNK_CALLS = 256
"""Maximum number of calls between two checks for timeouts."""

Results = list[EvaluateResult | None]
"""One per rollout, in order; None if the pass stopped before it."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    rollout: Rollout
    record: RolloutRecord
    step: int
    """Training step; rewards may take it as an argument."""
    batch: str
    """Key of the rollouts that a batch reward scores together: those of one step."""
    gold: Any
    """Gold answer: messages, or the text of the last one; None if the row has none."""
    row: Row
    """The row as stored in the file, with the columns that a run does not write."""

    @property
    def group(self) -> tuple[str, str]:
        return self.batch, self.rollout.group_id


def read_rollouts(
    path: str | Path, *, step: int | None = None, limit: int | None = None, validation: bool = False
) -> list[StoredRollout]:
    """Read all rollouts at `path` or those of one step; at most `limit`: the latest of a run, the first of a file."""
    path = Path(path)
    rollouts: list[StoredRollout] = []
    for file in reversed(_files(path, step, validation)):
        rows = _read_rows(file)
        rollouts = [*(_read_row(file, number, row) for number, row in enumerate(rows)), *rollouts]
        if limit is not None and len(rollouts) >= limit:
            break
    rollouts = [stored for stored in rollouts if step in (None, stored.step)]
    if step is not None and not rollouts:
        raise DataError(f"{path}: has no rollouts of step {step}; give another --step or leave it out")
    return rollouts[-limit:] if limit is not None and path.is_dir() else rollouts[:limit]


def _read_rows(file: Path) -> Sequence[Row]:
    """The rows of a file, which a run may compress or delete meanwhile."""
    if file.suffix == GZIP:
        try:
            return read_metrics(file, missing_ok=False)
        except FileNotFoundError:
            raise CheckpointError(f"{file}: was there a moment ago; has its run been resumed? Try again") from None
    try:
        return read_rows(file)
    except DataError:
        if file.exists() or not (packed := compressed_path(file)).exists():
            raise
        return _read_rows(packed)


def _files(path: Path, step: int | None, validation: bool) -> list[Path]:
    if not path.is_dir():
        return [path]
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    kind = "eval" if validation else "step"
    if not (files := list(rollout_files(folder, f"{kind}-*").values())):
        raise CheckpointError(f"{folder}: has no {kind}-*.jsonl; give the folder of a run that stored its rollouts")
    if not (named := [file for file in files if step in (None, _step_from_name(file))]):
        first, last = _step_from_name(files[0]), _step_from_name(files[-1])
        raise CheckpointError(f"{folder}: has no rollouts of step {step}; it has steps from {first} to {last}")
    return named


def _step_from_name(file: Path) -> int:
    return int(match[1]) if (match := _STEP_IN_NAME.search(stem(file))) else 0


def _read_row(path: Path, number: int, row: Row) -> StoredRollout:
    record = RolloutRecord.from_json(row)
    messages = _read_messages(path, number, row, "messages")
    prompt = _prompt_of(path, number, row, messages)
    reward_model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    truth = reward_model.get("ground_truth") if record.ground_truth is None else record.ground_truth
    step = row["step"] if type(row.get("step")) is int else _step_from_name(path)
    task = Task(
        task_id=record.task_id or _fingerprint(prompt, truth),
        prompt=prompt,
        ground_truth=truth,
        reward_kwargs=_arguments(path, number, row),
        extra_info=_extra_info(path, number, row),
        data_source=record.data_source,
    )
    # Conversations from other sources than a run count as answered.
    from_run = record.trained_on is not None and record.stop_reason in list(StopReason)
    rollout = Rollout(
        rollout_id=record.rollout_id or f"{path.stem}/{number}",
        group_id=record.group_id or task.task_id,
        batch_data_id=number,
        rollout_offset=0,
        task=task,
        route=None,
        steps=_steps_of(row, record, messages, prompt),
        messages=messages,
        stop_reason=StopReason(record.stop_reason) if from_run else StopReason.ANSWERED,
        usage=Usage(),
    )
    return StoredRollout(rollout, record, step, f"{path}#{step}", row.get("gold"), row)


def _read_messages(path: Path, number: int, row: Row, field: str) -> list[Message]:
    value = row.get(field)
    if not isinstance(value, list) or not value:
        hint = "this looks like a task file: give rollouts" if "prompt" in row else "give the whole conversation"
        raise row_error(path, number, field, f"missing, empty or not a list of messages; {hint}")
    try:
        return [Message.model_validate(message) for message in value]
    except ValidationError as fault:
        first = fault.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))} {first['msg']}; write {{role, content}} objects".strip()
        raise row_error(path, number, field, problem) from None


def _arguments(path: Path, number: int, row: Row) -> dict[str, Any]:
    """Keyword arguments of the reward: `reward_kwargs`, and in user files every other column too."""
    kwargs = row.get("reward_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise row_error(path, number, "reward_kwargs", "not an object; write names and values")
    # The other columns of a run's record describe the rollout; they are not reward arguments.
    columns = {} if "trained_on" in row else row
    return {**{name: value for name, value in columns.items() if name not in _NON_ARGUMENT_COLUMNS}, **kwargs}


def _extra_info(path: Path, number: int, row: Row) -> dict[str, Any]:
    """An object or its JSON text, as in a task file."""
    value = row.get("extra_info") or {}
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise row_error(path, number, "extra_info", "not an object; write an object or its JSON text")
    return value


def _prompt_of(path: Path, number: int, row: Row, messages: Sequence[Message]) -> list[Message]:
    """The messages before the first sampled assistant turn."""
    if isinstance(row.get("prompt"), list):
        return _read_messages(path, number, row, "prompt")
    assistant_turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if isinstance(row.get("steps"), list) and 0 < len(row["steps"]) <= len(assistant_turns):
        return list(messages[: assistant_turns[-len(row["steps"])]])
    user_turns = [index for index, message in enumerate(messages) if message.role == "user"]
    end = user_turns[-1] + 1 if user_turns else (assistant_turns[0] if assistant_turns else len(messages))
    return list(messages[:end])


def _steps_of(
    row: Row, record: RolloutRecord, messages: Sequence[Message], prompt: Sequence[Message]
) -> tuple[StepData, ...]:
    """The steps that step rewards must match: those a run stored, else one per assistant message (after the prompt if
    the row has one)."""
    if isinstance(row.get("steps"), list):
        return placeholder_steps([step.base_reward for step in record.steps])
    rest = messages[len(prompt) :] if "prompt" in row and messages[: len(prompt)] == prompt else messages
    return placeholder_steps([None for message in rest if message.role == "assistant"])


def placeholder_steps(base_rewards: Sequence[float | None]) -> tuple[StepData, ...]:
    """Steps of which only the index and the base reward are known."""
    return tuple(
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={},
            resulting_messages_history=[],
            base_reward=base_reward,
        )
        for index, base_reward in enumerate(base_rewards)
    )


def _fingerprint(prompt: Sequence[Message], truth: Any) -> str:
    """Task id for rows that have none."""
    text = json.dumps([[m.to_openai() for m in prompt], truth], sort_keys=True, default=str)
    return f"task-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:12]}"


def scoring_mode(scoring: Scoring) -> Mode:
    """What one call scores: a rollout, a group or a batch; with several rewards, the largest any of them needs."""
    modes: set[str] = {part.reward.mode for part in scoring.rewards.parts}
    if scoring.rewards.combine_mode == "normalize":  # normalizes within groups, so a call needs whole groups
        modes.add("group")
    return "batch" if "batch" in modes else "group" if "group" in modes else "pointwise"


def split_into_calls(stored: Sequence[StoredRollout], mode: Mode) -> list[list[int]]:
    """Indices of the rollouts in each call, in order of first appearance."""
    calls: dict[object, list[int]] = {}
    for index, rollout in enumerate(stored):
        key: object = index if mode == "pointwise" else rollout.group if mode == "group" else rollout.batch
        calls.setdefault(key, []).append(index)
    return list(calls.values())


async def score_rollouts(scoring: Scoring, stored: Sequence[StoredRollout], *, first_chunk: int = 1) -> Results:
    """Score all rollouts, in growing chunks of calls so that a hanging function is noticed early."""
    results: Results = [None] * len(stored)
    tried = timeouts = 0
    for calls in _chunk_calls(stored, split_into_calls(stored, scoring_mode(scoring)), first_chunk):
        if timeouts >= max(MAX_TIMEOUTS, MAX_TIMEOUT_SHARE * tried):
            break
        indices = [index for call in calls for index in call]
        rollouts = [stored[index].rollout for index in indices]
        scored = await scoring.evaluate(rollouts, step=stored[indices[0]].step)
        for index, result in zip(indices, scored, strict=True):
            results[index] = result
        tried += len(calls)
        errors = [scored_first.error for call in calls if (scored_first := results[call[0]]) is not None]
        timeouts += sum(error is not None and error.kind == "timeout" for error in errors)
    return results


def _chunk_calls(
    stored: Sequence[StoredRollout], calls: Sequence[list[int]], first_chunk: int
) -> Iterator[list[list[int]]]:
    """Chunks that double in size; all calls of a chunk share a step, since the step is passed to the reward."""
    size, chunk = first_chunk, list[list[int]]()
    for call in calls:
        if chunk and (len(chunk) >= size or stored[call[0]].batch != stored[chunk[0][0]].batch):
            yield chunk
            size, chunk = min(2 * size, _MAX_CHUNK_CALLS), []
        chunk.append(call)
    if chunk:
        yield chunk
