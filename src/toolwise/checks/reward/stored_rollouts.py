"""Rollouts that were kept, read back as the loop would hand them to a reward.

They come from a run's folder, from one of its files, or from any rows with `messages` and `ground_truth`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolwise.data.files import Row, read_rows, row_error
from toolwise.errors import CheckpointError, DataError
from toolwise.messages import Message
from toolwise.types import Rollout, StepData, StopReason, Task, Usage

_NON_ARGUMENT_COLUMNS = frozenset(
    {
        *("messages", "ground_truth", "gold", "prompt", "task_id", "group_id", "rollout_id", "step", "steps"),
        *(
            "score",
            "metrics",
            "reason",
            "error",
            "reward_kwargs",
            "reward_model",
            "data_source",
            "ability",
            "extra_info",
        ),
    }
)
"""Columns of rows of one's own that are no keyword arguments of the reward."""
_STEP_IN_NAME = re.compile(r"(?:step|eval)-(\d+)")


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One rollout that was kept."""

    rollout: Rollout
    step: int
    """The training step, which rewards may ask for."""
    batch: str
    """What a batch function was given together: the rollouts of one step."""
    gold: Any
    """How it should have gone: messages, or the text of the last one; None where nobody says."""
    row: Row
    """As it stood in the file."""

    @property
    def group(self) -> tuple[str, str]:
        return self.batch, self.rollout.group_id


def read_rollouts(
    path: str | Path, *, step: int | None = None, limit: int | None = None, validation: bool = False
) -> list[StoredRollout]:
    """The rollouts at `path`: all, or those of one step; at most `limit`, of a run the latest."""
    path = Path(path)
    found: list[StoredRollout] = []
    for file in reversed(_files(path, step, validation)):
        found = [*_read_file(file), *found]
        if limit is not None and len(found) >= limit:
            break
    if step is not None:
        found = [stored for stored in found if stored.step == step]
        if not found:
            raise DataError(f"{path}: has no rollouts of step {step}; give another --step or leave it out")
    if limit is None or len(found) <= limit:
        return found
    return found[-limit:] if path.is_dir() else found[:limit]


def _files(path: Path, step: int | None, validation: bool) -> list[Path]:
    if not path.is_dir():
        return [path]
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    kind = "eval" if validation else "step"
    files = sorted(folder.glob(f"{kind}-*.jsonl"))
    if not files:
        raise CheckpointError(f"{folder}: has no {kind}-*.jsonl; give the folder of a run that stored its rollouts")
    if step is None:
        return files
    named = [file for file in files if _step_from_name(file) == step]
    if not named:
        first, last = _step_from_name(files[0]), _step_from_name(files[-1])
        raise CheckpointError(f"{folder}: has no rollouts of step {step}; it has steps from {first} to {last}")
    return named


def _step_from_name(file: Path) -> int:
    found = _STEP_IN_NAME.search(file.stem)
    return int(found[1]) if found else 0


def _read_file(path: Path) -> list[StoredRollout]:
    return [_read_row(path, number, row) for number, row in enumerate(read_rows(path))]


def _read_row(path: Path, number: int, row: Row) -> StoredRollout:
    messages = _read_messages(path, number, row, "messages")
    prompt = _prompt_of(path, number, row, messages)
    truth = row.get("ground_truth")
    if truth is None and isinstance(row.get("reward_model"), dict):
        truth = row["reward_model"].get("ground_truth")
    step = row["step"] if _is_int(row.get("step")) else _step_from_name(path)
    task = Task(
        task_id=str(row.get("task_id") or _fingerprint(prompt, truth)),
        prompt=prompt,
        ground_truth=truth,
        reward_kwargs=_arguments(path, number, row),
        extra_info=_extra_info(path, number, row),
        data_source=str(row.get("data_source") or ""),
    )
    rollout = Rollout(
        rollout_id=str(row.get("rollout_id") or f"{path.stem}/{number}"),
        group_id=str(row.get("group_id") or task.task_id),
        batch_data_id=number,
        rollout_offset=0,
        task=task,
        route=None,
        steps=_steps_of(row, messages, prompt),
        messages=messages,
        stop_reason=_stop_reason(row),
        usage=Usage(),
    )
    return StoredRollout(rollout, step, f"{path}#{step}", row.get("gold"), row)


def _stop_reason(row: Row) -> StopReason:
    """As a run's own record has it; a conversation from elsewhere counts as answered."""
    known = "trained_on" in row and row.get("stop_reason") in list(StopReason)
    return StopReason(row["stop_reason"]) if known else StopReason.ANSWERED


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_messages(path: Path, number: int, row: Row, field: str) -> list[Message]:
    value = row.get(field)
    if not isinstance(value, list) or not value:
        hint = "this looks like a file of tasks: give rollouts" if "prompt" in row else "give the whole conversation"
        raise row_error(path, number, field, f"missing, empty or no list of messages; {hint}")
    try:
        return [Message.model_validate(message) for message in value]
    except ValidationError as fault:
        told = fault.errors()[0]
        where = ".".join(map(str, told["loc"]))
        raise row_error(
            path, number, field, f"{where} {told['msg']}; write {{role, content}} objects".strip()
        ) from None


def _arguments(path: Path, number: int, row: Row) -> dict[str, Any]:
    """Keyword arguments of the reward: what a run kept as such, or every further column of a file of one's own."""
    kept = row.get("reward_kwargs") or {}
    if not isinstance(kept, dict):
        raise row_error(path, number, "reward_kwargs", "no object; write names and values")
    if "trained_on" in row:  # a run's own record: its columns say what happened, not what the reward was given
        return dict(kept)
    return {**{name: value for name, value in row.items() if name not in _NON_ARGUMENT_COLUMNS}, **kept}


def _extra_info(path: Path, number: int, row: Row) -> dict[str, Any]:
    """An object or its JSON text, as in a file of tasks."""
    value = row.get("extra_info") or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise row_error(path, number, "extra_info", "not an object; write an object or its JSON text")
    return value


def _prompt_of(path: Path, number: int, row: Row, messages: Sequence[Message]) -> list[Message]:
    """The conversation before the assistant's first turn that was sampled."""
    if isinstance(row.get("prompt"), list):
        return _read_messages(path, number, row, "prompt")
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if isinstance(row.get("steps"), list) and 0 < len(row["steps"]) <= len(turns):
        return list(messages[: turns[-len(row["steps"])]])
    asked = [place for place, message in enumerate(messages) if message.role == "user"]
    end = asked[-1] + 1 if asked else (turns[0] if turns else len(messages))
    return list(messages[:end])


def _steps_of(row: Row, messages: Sequence[Message], prompt: Sequence[Message]) -> tuple[StepData, ...]:
    """As many steps as a run stored, else one for each time the assistant spoke, after the prompt where the row has
    one: what step rewards must fit."""
    kept = row.get("steps")
    if not isinstance(kept, list):
        behind = messages[len(prompt) :] if "prompt" in row and messages[: len(prompt)] == prompt else messages
        kept = [{} for message in behind if message.role == "assistant"]
    return tuple(
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={},
            resulting_messages_history=[],
            base_reward=step.get("base_reward") if isinstance(step, dict) else None,
        )
        for index, step in enumerate(kept)
    )


def _fingerprint(prompt: Sequence[Message], truth: Any) -> str:
    """What tells tasks apart where rows do not name them."""
    text = json.dumps([[m.to_openai() for m in prompt], truth], sort_keys=True, default=str)
    return f"task-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:12]}"
