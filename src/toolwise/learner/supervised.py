"""Supervised learning on conversations: loss on what assistants wrote and on nothing else, rows packed end to end.

loss = − Σ log p(assistant token) / number of assistant tokens in the batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.rollout.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens; `loss_mask` is True where the assistant wrote the token."""

    ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True, slots=True)
class SftSettings:
    """How to teach."""

    steps: int = 1000
    batch_tokens: int = 8192
    """Tokens a step, packed into rows of `row_tokens`."""
    row_tokens: int = 1024
    lr: float = 1e-3
    warmup: float = 0.05
    """Share of the steps over which the rate rises; it then falls to a tenth along a cosine."""
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    lora_rank: int = 0
    """0: the whole model learns; else adapters of that rank do, and are merged into what is saved."""
    lora_alpha: float = 32.0
    seed: int = 0


def tokenize_conversation(
    chat: ChatTokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> Example:
    """A conversation as rollouts would have produced it: prompt, reply, what follows, reply, …"""
    ids: list[int] = []
    loss_mask: list[bool] = []
    pending: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            pending.append(message)
            continue
        opening = chat.encode_continuation(pending, tools) if ids else chat.start(pending, tools)
        reply = chat.reply(message, tools)
        ids += [*opening, *reply]
        loss_mask += [False] * len(opening) + [True] * len(reply)
        pending = []
    if not any(loss_mask):
        raise DataError("a conversation without an assistant message teaches nothing: add one or leave it out")
    return Example(ids, loss_mask)


def pack_examples(examples: Sequence[Example], row_tokens: int) -> Iterator[list[Example]]:
    """Fill rows with whole conversations, in order; one too long for any row is cut at its end, and left out where
    nothing that is taught is left of it."""
    row: list[Example] = []
    used = 0
    for example in examples:
        kept = Example(example.ids[:row_tokens], example.loss_mask[:row_tokens])
        if not any(kept.loss_mask[1:]):
            continue
        if row and used + len(kept.ids) > row_tokens:
            yield row
            row, used = [], 0
        row.append(kept)
        used += len(kept.ids)
    if row:
        yield row


def collate(rows: Sequence[Sequence[Example]], pad_id: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Rows as tensors. Positions restart with each conversation and no token sees another conversation."""
    width = max(sum(len(e.ids) for e in row) for row in rows)
    shape = (len(rows), width)
    ids = torch.full(shape, pad_id)
    labels = torch.full(shape, -100)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1)
    for r, row in enumerate(rows):
        at = 0
        for s, example in enumerate(row):
            end = at + len(example.ids)
            token_ids = torch.tensor(example.ids)
            ids[r, at:end] = token_ids
            labels[r, at:end] = torch.where(torch.tensor(example.loss_mask), token_ids, -100)
            labels[r, at] = -100  # nothing of its own stands before it
            positions[r, at:end] = torch.arange(end - at)
            segments[r, at:end] = s
            at = end
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = (same & causal)[:, None]
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def batches(examples: Sequence[Example], settings: SftSettings) -> Iterator[list[list[Example]]]:
    """Endless: epochs of freshly shuffled, packed rows, `batch_tokens` a batch."""
    rng = Random(settings.seed)
    rows_per_batch = max(1, settings.batch_tokens // settings.row_tokens)
    waiting: list[list[Example]] = []
    while True:
        order = list(examples)
        rng.shuffle(order)
        rows = list(pack_examples(order, settings.row_tokens))
        if not rows:
            raise DataError(
                f"there is nothing to teach: no conversation has an assistant's token among its first "
                f"{settings.row_tokens}; add conversations or raise row_tokens"
            )
        for row in rows:
            waiting.append(row)
            if len(waiting) == rows_per_batch:
                yield waiting
                waiting = []


def learning_rate(step: int, settings: SftSettings) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm = max(1, int(settings.warmup * settings.steps))
    if step < warm:
        return settings.lr * (step + 1) / warm
    progress = (step - warm) / max(1, settings.steps - warm)
    return settings.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def sft_steps(
    model: Any, examples: Sequence[Example], settings: SftSettings, *, pad_id: int
) -> Iterator[dict[str, float]]:
    """Teach `model` in place, giving each step's figures."""
    device = next(model.parameters()).device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=settings.weight_decay, betas=(0.9, 0.98))
    model.train()
    source = batches(examples, settings)
    for step in range(settings.steps):
        batch = collate(next(source), pad_id, device)
        labels = batch.pop("labels")[:, 1:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        hidden = model.model(**batch, use_cache=False).last_hidden_state[:, :-1]
        at = labels != -100
        logits = model.lm_head(hidden[at]).float()
        loss = cross_entropy(logits, labels[at])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(weights, settings.max_grad_norm))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield {"loss": loss.item(), "grad_norm": norm, "tokens": float(at.sum())}
    model.eval()
