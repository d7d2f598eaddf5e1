"""Supervised fine-tuning (SFT) on conversations: packed rows, loss on assistant tokens only.

loss = − Σ log p(assistant token) / number of assistant tokens in the batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch.nn.functional import cross_entropy

from toolwise.config.loader import Section
from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.rollout.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens; `loss_mask` is True where the assistant wrote the token."""

    ids: list[int]
    loss_mask: list[bool]


class SftSettings(Section):
    steps: PositiveInt = 1000
    batch_tokens: PositiveInt = 8192
    """Tokens per step, packed into rows of `row_tokens`."""
    row_tokens: int = Field(default=1024, ge=2)
    lr: float = Field(default=1e-3, ge=0.0)
    warmup: float = Field(default=0.05, ge=0.0)
    """Fraction of the steps for linear warm-up; cosine decay to a tenth follows."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    lora_rank: int = Field(default=0, ge=0)
    """0 trains the whole model; otherwise LoRA adapters of this rank, merged into the saved model."""
    lora_alpha: PositiveFloat = 32.0
    seed: int = 0


def tokenize_conversation(
    chat: ChatTokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> Example:
    """Tokenise a conversation as a rollout would have produced it: prompt, reply, continuation, reply, …"""
    ids: list[int] = []
    loss_mask: list[bool] = []
    pending: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            pending.append(message)
            continue
        prompt = chat.encode_continuation(pending, tools) if ids else chat.start(pending, tools)
        reply = chat.reply(message, tools)
        ids += [*prompt, *reply]
        loss_mask += [False] * len(prompt) + [True] * len(reply)
        pending = []
    if not any(loss_mask):
        raise DataError("the conversation has no assistant message to train on: add one or leave the conversation out")
    return Example(ids, loss_mask)


def pack_examples(examples: Sequence[Example], row_tokens: int) -> Iterator[list[Example]]:
    """Fill rows with whole conversations, in order. One longer than a row is truncated, and dropped if no token to
    train on is left."""
    row: list[Example] = []
    used = 0
    for example in examples:
        cut = Example(example.ids[:row_tokens], example.loss_mask[:row_tokens])
        if not any(cut.loss_mask[1:]):
            continue
        if row and used + len(cut.ids) > row_tokens:
            yield row
            row, used = [], 0
        row.append(cut)
        used += len(cut.ids)
    if row:
        yield row


def collate(rows: Sequence[Sequence[Example]], pad_id: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Rows as tensors. Positions restart with each conversation, and tokens attend only within their conversation."""
    width = max(sum(len(e.ids) for e in row) for row in rows)
    shape = (len(rows), width)
    ids = torch.full(shape, pad_id)
    labels = torch.full(shape, -100)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1)
    for row_index, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row):
            end = start + len(example.ids)
            token_ids = torch.tensor(example.ids)
            ids[row_index, start:end] = token_ids
            labels[row_index, start:end] = torch.where(torch.tensor(example.loss_mask), token_ids, -100)
            labels[row_index, start] = -100  # the first token has no context
            positions[row_index, start:end] = torch.arange(end - start)
            segments[row_index, start:end] = segment
            start = end
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = (same & causal)[:, None]
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def batches(examples: Sequence[Example], settings: SftSettings) -> Iterator[list[list[Example]]]:
    """Endless batches of `batch_tokens` tokens, reshuffled and repacked each epoch."""
    rng = Random(settings.seed)
    rows_per_batch = max(1, settings.batch_tokens // settings.row_tokens)
    waiting: list[list[Example]] = []
    while True:
        order = list(examples)
        rng.shuffle(order)
        rows = list(pack_examples(order, settings.row_tokens))
        if not rows:
            raise DataError(
                f"there is nothing to train on: no conversation has an assistant token among its first "
                f"{settings.row_tokens} tokens; add conversations or raise row_tokens"
            )
        for row in rows:
            waiting.append(row)
            if len(waiting) == rows_per_batch:
                yield waiting
                waiting = []


def learning_rate(step: int, settings: SftSettings) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    warm = max(1, int(settings.warmup * settings.steps))
    if step < warm:
        return settings.lr * (step + 1) / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    return settings.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def sft_steps(
    model: Any, examples: Sequence[Example], settings: SftSettings, *, pad_id: int
) -> Iterator[dict[str, float]]:
    """Train `model` in place, yielding each step's metrics."""
    device = next(model.parameters()).device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=settings.weight_decay, betas=(0.9, 0.98))
    model.train()
    batch_stream = batches(examples, settings)
    for step in range(settings.steps):
        batch = collate(next(batch_stream), pad_id, device)
        labels = batch.pop("labels")[:, 1:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        hidden = model.model(**batch, use_cache=False).last_hidden_state[:, :-1]
        mask = labels != -100
        logits = model.lm_head(hidden[mask]).float()
        loss = cross_entropy(logits, labels[mask])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(weights, settings.max_grad_norm))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield {"loss": loss.item(), "grad_norm": norm, "tokens": float(mask.sum())}
    model.eval()
