"""Writes rollouts to disk: readable JSON lines, with tokens and log-probs in a safetensors file next to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.protocols import Callback
from toolwise.serialization.json_text import json_line, json_text
from toolwise.types import CreditedRollout, ScoredRollout, StepData, StepEvent, ValidationEvent
from toolwise.untrusted.bounds import MAX_WARNINGS


class RolloutFiles(Callback):
    """Writes the rollouts of each step and of each validation to RUN/rollouts."""

    def on_step(self, event: StepEvent) -> None:
        write_records(event.run_folder / "rollouts", f"step-{event.step:06d}", event.rollouts, event.credited)

    def on_validation(self, event: ValidationEvent) -> None:
        write_records(event.run_folder / "rollouts", f"eval-{event.step:06d}", event.rollouts, [])


def rollout_record(scored: ScoredRollout, credited: CreditedRollout | None = None) -> dict[str, Any]:
    """One rollout as a JSON object, with advantages if the update used it."""
    rollout, result = scored.rollout, scored.result
    steps = credited.steps if credited is not None else scored.steps
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "task_id": rollout.task.task_id,
        "kind": rollout.task.extra_info.get("kind"),
        "route": rollout.route,
        "messages": [m.to_openai() for m in rollout.messages],
        "ground_truth": rollout.task.ground_truth,
        "reward_kwargs": rollout.task.reward_kwargs,
        "extra_info": rollout.task.extra_info,
        "data_source": rollout.task.data_source,
        "score": result.score,
        "metrics": {name: metric.score for name, metric in result.metrics.items()},
        "reason": result.reason,
        "error": result.error.model_dump() if result.error else None,
        "warnings": _first_warnings(scored.warnings),
        "stop_reason": rollout.stop_reason.value,
        "fault": rollout.fault,
        "infrastructure_fault": rollout.infrastructure_fault,
        "cost": rollout.usage.cost,
        "calls": dict(rollout.usage.calls),
        "failed_calls": dict(rollout.usage.failed_calls),
        "trained_on": credited is not None,
        "steps": [
            {
                "advantage": step.advantage,
                "base_reward": step.base_reward,
                "tokens": len(step.tokens.token_ids),
            }
            for step in steps
        ],
    }


def write_records(
    folder: Path, name: str, scored: Sequence[ScoredRollout], credited: Sequence[CreditedRollout]
) -> None:
    """Write `name`.jsonl and `name`.safetensors, each atomically."""
    by_id = {c.rollout.rollout_id: c for c in credited}
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokens(folder / f"{name}.safetensors", [(s.rollout.rollout_id, s.steps) for s in scored])
    lines = (json_line(rollout_record(s, by_id.get(s.rollout.rollout_id))) for s in scored)
    write_atomic(folder / f"{name}.jsonl", b"".join(lines))


def _first_warnings(warnings: Sequence[str]) -> list[str]:
    omitted = len(warnings) - MAX_WARNINGS
    return [*warnings[:MAX_WARNINGS], *([f"… and {omitted:,} more"] if omitted > 0 else ())]


def _write_tokens(path: Path, rollouts: Iterable[tuple[str, Sequence[StepData]]]) -> None:
    """Flat arrays over all steps; `steps` in the metadata lists (rollout, step) in the order of the offsets."""
    import numpy as np
    from safetensors.numpy import save

    names: list[tuple[str, int]] = []
    arrays: Mapping[str, list[Any]] = {"prompt_ids": [], "token_ids": [], "logprobs": []}
    for rollout_id, steps in rollouts:
        for step in steps:
            if step.tokens.has_ids:
                names.append((rollout_id, step.system_step_index))
                for key, parts in arrays.items():
                    dtype = np.float32 if key == "logprobs" else np.int32
                    parts.append(np.array(list(getattr(step.tokens, key)), dtype=dtype))
    if not names:
        return
    tensors = {key: np.concatenate(parts) for key, parts in arrays.items()}
    for key in ("prompt_ids", "token_ids"):
        tensors[f"{key}.offsets"] = np.cumsum([0, *map(len, arrays[key])]).astype(np.int64)
    write_atomic(path, save(tensors, metadata={"steps": json_text(names, ascii_only=True)}))


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file that exists completely or not at all, even if the process dies; `private`: mode 0600."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600 if private else 0o666)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
