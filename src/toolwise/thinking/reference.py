"""A plain `transformers` model as a `ThinkingModel`, one request after the other and padded: slow, simple, and what
faster ones are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolwise.protocols import Generation, Metrics, Sampling
from toolwise.thinking.thinking_model import ScoringRequest, TokenScores


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """`padding` "none" scores continuations one by one."""

    model: Any
    padding: Literal["none", "left", "right"] = "none"
    pad_id: int = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Without a cache: every token from the whole text."""
        import torch

        ids, drawn = list(token_ids), list[float]()
        generator = torch.Generator().manual_seed(sampling.seed & 0x7FFF_FFFF)
        while len(drawn) < sampling.max_new_tokens:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            if not sampling.do_sample:
                token = int(logprobs.argmax())
            ids.append(token)
            drawn.append(float(logprobs[token]))
            if token in sampling.stop_token_ids:
                return Generation(ids[len(token_ids) :], drawn, "stop", 0)
        return Generation(ids[len(token_ids) :], drawn, "length", 0)

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
        found = []
        for c in contexts:
            rows = [[*c.prefix_ids, *ids] for ids in c.continuations]
            batches = [[row] for row in rows] if self.padding == "none" else [rows]
            scores = [pair for batch in batches for pair in self._score(batch, temperature)]
            found.append(tuple(TokenScores(*(x[len(c.prefix_ids) :] for x in pair)) for pair in scores))
        return found

    def counters(self) -> Metrics:
        return {}

    def _score(self, rows: Sequence[Sequence[int]], temperature: float) -> list[tuple[Any, Any]]:
        """Log-prob and entropy of each token; 0 for the first, which nothing predicts."""
        import torch

        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        places = []
        for number, row in enumerate(rows):
            start = width - len(row) if self.padding == "left" else 0
            places.append(slice(start, start + len(row)))
            ids[number, places[-1]], mask[number, places[-1]] = torch.tensor(row), 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        found = []
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            logp = torch.log_softmax(logits[number, place][:-1].float() / temperature, -1)
            of_tokens = logp.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
            entropies = -(logp.exp() * logp).sum(-1)
            found.append(tuple(torch.nn.functional.pad(x, (1, 0)).numpy() for x in (of_tokens, entropies)))
        return found  # type: ignore[return-value]
