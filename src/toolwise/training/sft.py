"""Supervised learning from files: conversations in, a taught model's folder out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from toolwise.data.files import read_rows, row_error
from toolwise.errors import ConfigError, DataError, ModelError
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.serialization.files import disk_fault

if TYPE_CHECKING:
    from toolwise.learner.supervised import SftSettings


def train_sft(
    model_path: str, data: str | Path | Sequence[Mapping[str, Any]], out: Path, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Teach the model at `model_path` on `data` and save it to `out`; gives the first and the last figures."""
    from toolwise.learner.lora import Adapters, LoraSettings
    from toolwise.learner.supervised import sft_steps, tokenize_conversation
    from toolwise.terminal.display import track

    settings = dict(settings)
    trusted = bool(settings.pop("trust_remote_code", False))
    taught = _read_settings(settings)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder: choose another one for the taught model")
    path = Path(data) if isinstance(data, str | Path) else Path("data")
    rows = read_rows(path) if isinstance(data, str | Path) else [dict(row) for row in data]
    conversations = [read_conversation(path, number, row) for number, row in enumerate(rows)]
    model, chat = load_model(model_path, trust_remote_code=trusted)
    examples = []
    for number, (messages, tools) in enumerate(conversations):
        try:
            example = tokenize_conversation(chat, messages, tools)
        except (DataError, ModelError) as fault:
            raise row_error(path, number, "messages", str(fault)) from fault
        if not any(example.loss_mask[: taught.row_tokens]):
            problem = f"the assistant first speaks after row_tokens = {taught.row_tokens} tokens: raise it, or shorten"
            raise row_error(path, number, "messages", problem)
        examples.append(example)
    if not examples:
        raise DataError(f"{path}: there are no conversations to teach on")
    rank = taught.lora_rank
    adapters = Adapters(model, LoraSettings(rank, taught.lora_alpha)) if rank else None
    steps = sft_steps(model, examples, taught, pad_id=chat.pad_id)
    figures = list(track(steps, "teaching", total=taught.steps, disable=not settings.get("progress")))
    _save(out, model.save_pretrained if adapters is None else adapters.save_merged, chat.tokenizer.save_pretrained)
    return {"first_loss": figures[0]["loss"], **figures[-1]}


def _save(out: Path, *writers: Callable[[Path], Any]) -> None:
    """All of the model, or nothing of it: written to a folder within `out`, whose files are then moved up."""
    new, aside = not out.exists(), out / f".tmp-{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        for write in writers:
            write(aside)
        for file in aside.iterdir():
            file.rename(out / file.name)
        aside.rmdir()
    except BaseException as fault:
        shutil.rmtree(out if new else aside, ignore_errors=True)
        if (reason := disk_fault(fault)) is None:
            raise
        raise ModelError(f"cannot write {out}: {reason}; nothing was left there") from fault


def _read_settings(settings: Mapping[str, Any]) -> SftSettings:
    from toolwise.learner.supervised import SftSettings

    given = {name: value for name, value in settings.items() if name != "progress"}
    known = {field.name for field in fields(SftSettings)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"sft has no setting {unknown[0]!r}; it has: {', '.join(sorted(known))}")
    taught = SftSettings(**given)
    if taught.steps < 1 or taught.row_tokens < 2:
        raise ConfigError(f"sft needs steps >= 1 and row_tokens >= 2, not {taught.steps} and {taught.row_tokens}")
    if taught.lora_rank < 0:
        raise ConfigError(f"sft needs lora_rank >= 0, not {taught.lora_rank}; 0 teaches the whole model")
    return taught


def read_conversation(
    path: Path, number: int, row: Mapping[str, Any]
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """A row's messages (column `messages`, or `prompt` with `response`) and the tools it offers, if any."""
    raw = row.get("messages")
    if raw is None and "prompt" in row and "response" in row:
        prompt = row["prompt"]
        raw = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        raw = [*raw, {"role": "assistant", "content": row["response"]}]
    if not isinstance(raw, list) or not raw:
        raise row_error(path, number, "messages", "expected a list of {role, content}: one conversation a row")
    messages = []
    for place, message in enumerate(raw):
        try:
            messages.append(Message.model_validate(message))
        except ValidationError as fault:
            reason = fault.errors()[0]
            field = ".".join(map(str, (f"messages[{place}]", *reason["loc"])))
            raise row_error(path, number, field, f"{reason['msg']}, got {reason['input']!r:.60}; correct it") from fault
        if messages[-1].content is None and not messages[-1].tool_calls:
            raise row_error(path, number, f"messages[{place}].content", "missing, and there are no tool_calls")
    tools = row.get("tools")
    if tools and (not isinstance(tools, list) or not all(isinstance(t, dict) and "function" in t for t in tools)):
        raise row_error(path, number, "tools", "expected a list of tool schemas in OpenAI's form")
    return messages, tools or None
