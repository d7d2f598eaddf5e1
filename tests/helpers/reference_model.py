"""A plain `transformers` model as a `ThinkingModel`: slow and simple, one request at a time; the reference for faster
implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolwise.protocols import Generation, Metrics, Sampling
from toolwise.thinking.thinking_model import ScoringRequest, TokenScores


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """With `padding="none"`, continuations are scored one by one."""

    model: Any
    padding: Literal["none", "left", "right"] = "none"
    pad_id: int = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Generate without a KV cache."""
        import torch

        ids, token_logprobs = list(token_ids), list[float]()
        generator = torch.Generator().manual_seed(sampling.seed & 0x7FFF_FFFF)
        while len(token_logprobs) < sampling.max_new_tokens:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            if not sampling.do_sample:
                token = int(logprobs.argmax())
            ids.append(token)
            token_logprobs.append(float(logprobs[token]))
            if token in sampling.stop_token_ids:
                return Generation(ids[len(token_ids) :], token_logprobs, "stop", 0)
        return Generation(ids[len(token_ids) :], token_logprobs, "length", 0)

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
        result = []
        for c in contexts:
            rows = [[*c.prefix_ids, *ids] for ids in c.continuations]
            batches = [[row] for row in rows] if self.padding == "none" else [rows]
            scores = [pair for batch in batches for pair in self._score(batch, temperature)]
            result.append(tuple(TokenScores(*(x[len(c.prefix_ids) :] for x in pair)) for pair in scores))
        return result

    def counters(self) -> Metrics:
        return {}

    def _score(self, rows: Sequence[Sequence[int]], temperature: float) -> list[tuple[Any, Any]]:
        """Log-prob and entropy of each token; 0 for the first, which has no context."""
        import torch

        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        spans = []
        for index, row in enumerate(rows):
            start = width - len(row) if self.padding == "left" else 0
            spans.append(slice(start, start + len(row)))
            ids[index, spans[-1]], mask[index, spans[-1]] = torch.tensor(row), 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        result = []
        for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
            logp = torch.log_softmax(logits[index, span][:-1].float() / temperature, -1)
            logprobs = logp.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
            entropies = -(logp.exp() * logp).sum(-1)
            result.append(tuple(torch.nn.functional.pad(x, (1, 0)).numpy() for x in (logprobs, entropies)))
        return result  # type: ignore[return-value]
