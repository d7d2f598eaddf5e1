"""The actor: owns the weights, and takes PPO steps on credited rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from toolwise.errors import CheckpointError
from toolwise.learner.losses import clipped_policy_loss, token_logprobs
from toolwise.learner.rows import Row, build_rows, split_by_tokens
from toolwise.protocols import Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, ScoredRollout


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """How to update."""

    lr: float = 1e-6
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0
    ppo_epochs: int = 1
    mini_batches: int = 1
    """Optimiser steps an epoch."""
    micro_batch_tokens: int = 16_384
    temperature: float = 1.0
    seed: int = 0


class Actor:
    """Shares its model with the local policy: what an update changes, the next token is drawn from."""

    def __init__(self, model: Any, settings: ActorSettings, *, pad_id: int) -> None:
        self.model = model
        self.settings = settings
        self.pad_id = pad_id
        self.version = 0
        self.skipped_updates = 0
        self._weights: list[Tensor] = list(model.parameters())
        # Half precision swallows small steps: there the optimiser works on fp32 copies of the weights.
        self._masters = [w if torch.finfo(w.dtype).bits >= 32 else w.detach().float() for w in self._weights]
        self.optimizer = torch.optim.AdamW(
            self._masters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def annotate(self, scored: Sequence[ScoredRollout]) -> list[AnnotatedRollout]:
        """GRPO needs nothing that only the learner knows; the rollout's own log-probs are the old ones."""
        return [AnnotatedRollout(s) for s in scored]

    def update(self, credited: Sequence[CreditedRollout]) -> Metrics:
        rows = [row for row in build_rows(credited) if any(row.sampled[1:])]
        self.version += 1
        if not rows:
            return {"actor/updates": 0.0}
        gaps = self._logprob_gaps(rows)
        sums: dict[str, float] = {}
        updates = 0
        # The model stays as the policy uses it: dropout would put the ratio off 1 before any weight has moved.
        for batch in self._mini_batches(rows):
            for name, value in self._step(batch).items():
                sums[name] = sums.get(name, 0.0) + value
            updates += 1
        means = {f"actor/{name}": value / updates for name, value in sums.items()}
        return (
            means
            | gaps
            | {
                "actor/updates": float(updates),
                "actor/skipped_updates": float(self.skipped_updates),
                "actor/lr": self._rate(),
            }
        )

    @torch.no_grad()
    def _logprob_gaps(self, rows: Sequence[Row]) -> Metrics:
        """The canary: do the policy and the learner agree on what the same weights give the same tokens?

        Looked at before any weight moves, on one micro-batch of rows from all over the batch.
        """
        few = list(rows)[:: max(1, len(rows) // 16)]
        gaps = [self._gap(part) for part in split_by_tokens(few, self.settings.micro_batch_tokens)]
        count = sum(len(gap) for gap in gaps)
        return {
            "canary/logprob_gap_mean": sum(float(gap.sum()) for gap in gaps) / count,
            "canary/logprob_gap_max": max(float(gap.max()) for gap in gaps),
        }

    def _gap(self, rows: Sequence[Row]) -> Tensor:
        logprobs, _, old, _ = self.forward(rows)
        return (logprobs - old).abs()

    def _mini_batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        rng = Random(f"{self.settings.seed}/{self.version}")
        count = min(self.settings.mini_batches, len(rows))
        for _ in range(self.settings.ppo_epochs):
            order = list(rows)
            if count > 1:
                rng.shuffle(order)
            for part in range(count):
                yield order[part::count]

    def _step(self, rows: Sequence[Row]) -> Metrics:
        """One optimiser step: gradients of all micro-batches, added up before the weights move."""
        tokens = sum(sum(row.sampled[1:]) for row in rows)
        sums = {"loss": 0.0, "entropy": 0.0, "clip_frac": 0.0, "kl": 0.0}
        for part in split_by_tokens(rows, self.settings.micro_batch_tokens):
            loss, parts = self._micro_batch(part, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            self._hand_gradients_over()
            for name, value in parts.items():
                sums[name] += value
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self.settings.max_grad_norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate()
            self.optimizer.step()
            self._publish()
        else:
            self.skipped_updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return sums | {"grad_norm": norm}

    def _hand_gradients_over(self) -> None:
        """From half-precision weights to their fp32 copies, added up there; nothing to do for weights in fp32."""
        for weight, master in self._copies():
            if weight.grad is not None:
                found = weight.grad.float()
                master.grad = found if master.grad is None else master.grad + found
                weight.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        for weight, master in self._copies():
            weight.copy_(master)

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((w, m) for w, m in zip(self._weights, self._masters, strict=True) if w is not m)

    def _micro_batch(self, rows: Sequence[Row], tokens: int) -> tuple[Tensor, Metrics]:
        s = self.settings
        logprobs, entropy, old, advantages = self.forward(rows)
        losses, clipped = clipped_policy_loss(logprobs, old, advantages, clip_low=s.clip_low, clip_high=s.clip_high)
        loss = losses.sum() / tokens
        if s.entropy_coef:
            loss = loss - s.entropy_coef * entropy.sum() / tokens
        parts = {
            "loss": float(losses.detach().sum()),
            "entropy": float(entropy.detach().sum()),
            "clip_frac": float(clipped.sum()),
            "kl": float((old - logprobs.detach()).sum()),
        }
        return loss, {name: value / tokens for name, value in parts.items()}

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs and entropies of the sampled tokens of `rows`, with their old log-probs and advantages, flat.

        Logits are computed for sampled tokens only.
        """
        device = next(self.model.parameters()).device
        width = max(map(len, rows))
        ids = torch.tensor([[*r.ids, *[self.pad_id] * (width - len(r))] for r in rows], device=device)
        mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows], device=device)
        sampled = torch.tensor([[*r.sampled, *[False] * (width - len(r))] for r in rows], device=device)
        hidden = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        at = sampled[:, 1:]
        logits = self.model.lm_head(hidden[at])
        logprobs, entropy = token_logprobs(logits, ids[:, 1:][at], self.settings.temperature)
        old = [value for r in rows for value, here in zip(r.logprobs[1:], r.sampled[1:], strict=True) if here]
        advantages = [value for r in rows for value, here in zip(r.advantages[1:], r.sampled[1:], strict=True) if here]
        return logprobs, entropy, torch.tensor(old, device=device), torch.tensor(advantages, device=device)

    def _rate(self) -> float:
        return self.settings.lr * min(1.0, self.version / max(1, self.settings.warmup_steps))

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, which `save_model` writes in a form that others can read."""
        return {
            "version": self.version,
            "skipped_updates": self.skipped_updates,
            "optimizer": self.optimizer.state_dict(),
            "masters": [master for _, master in self._copies()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]
        self.skipped_updates = state["skipped_updates"]
        for (_, master), saved in zip(self._copies(), state.get("masters", ()), strict=True):
            master.copy_(saved)

    def save_model(self, folder: Path) -> None:
        """The weights as a folder that plain `transformers` loads."""
        self.model.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Weights that `save_model` wrote, into the model the policy shares."""
        saved = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
        try:
            self.model.load_state_dict(saved.state_dict())
        except RuntimeError as fault:
            reason = str(fault).splitlines()[-1].strip()
            raise CheckpointError(f"{folder} holds another model than the run's: {reason}") from fault
        for weight, master in self._copies():
            # A copy that rounds to its weight is the finer of the two, and was loaded with the state.
            master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.detach().float()))
