"""Supervised fine-tuning: reads conversations from files and writes the trained model to a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolwise.config.loader import build_config
from toolwise.config.schema import LoraConfig
from toolwise.data.files import read_rows, row_error
from toolwise.data.prompts import read_message
from toolwise.errors import ConfigError, DataError, ModelError
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.serialization.files import disk_fault


def train_sft(
    model_path: str, data: str | Path | Sequence[Mapping[str, Any]], out: Path, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Fine-tune the model at `model_path` on `data` and save it to `out`; return the first loss and final metrics."""
    from toolwise.learner.lora import Adapters
    from toolwise.learner.supervised import SftSettings, sft_steps, tokenize_conversation
    from toolwise.terminal.display import track

    settings = dict(settings)
    trusted = bool(settings.pop("trust_remote_code", False))
    progress = bool(settings.pop("progress", False))
    sft_settings = build_config(SftSettings, settings, source="sft")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder: choose another one for the trained model")
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
        if not any(example.loss_mask[: sft_settings.row_tokens]):
            problem = f"no assistant tokens within row_tokens = {sft_settings.row_tokens}: raise it, or shorten the row"
            raise row_error(path, number, "messages", problem)
        examples.append(example)
    if not examples:
        raise DataError(f"{path}: there are no conversations to train on")
    lora = LoraConfig(rank=sft_settings.lora_rank, alpha=sft_settings.lora_alpha)
    adapters = Adapters(model, lora) if lora.rank else None
    steps = sft_steps(model, examples, sft_settings, pad_id=chat.pad_id)
    metrics = list(track(steps, "training", total=sft_settings.steps, disable=not progress))
    _save(out, model.save_pretrained if adapters is None else adapters.save_merged, chat.tokenizer.save_pretrained)
    return {"first_loss": metrics[0]["loss"], **metrics[-1]}


def _save(out: Path, *writers: Callable[[Path], Any]) -> None:
    """Save the complete model or nothing: written to a folder within `out`, whose files are then moved up."""
    new, temporary = not out.exists(), out / f".tmp-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        for write in writers:
            write(temporary)
        for file in temporary.iterdir():
            file.rename(out / file.name)
        temporary.rmdir()
    except BaseException as fault:
        shutil.rmtree(out if new else temporary, ignore_errors=True)
        if (reason := disk_fault(fault)) is None:
            raise
        raise ModelError(f"cannot write {out}: {reason}; partial files were removed") from fault


def read_conversation(
    path: Path, number: int, row: Mapping[str, Any]
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """A row's messages (column `messages`, or `prompt` and `response`) and its tool schemas, if any."""
    raw = row.get("messages")
    if raw is None and "prompt" in row and "response" in row:
        prompt = row["prompt"]
        raw = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        raw = [*raw, {"role": "assistant", "content": row["response"]}]
    error = partial(row_error, path, number)
    if not isinstance(raw, list) or not raw:
        raise error("messages", "expected a list of {role, content}, one conversation per row")
    messages = [read_message(error, message, f"messages[{index}]") for index, message in enumerate(raw)]
    tools = row.get("tools")
    if tools and (not isinstance(tools, list) or not all(isinstance(t, dict) and "function" in t for t in tools)):
        raise error("tools", "expected a list of tool schemas in OpenAI's format")
    return messages, tools or None
