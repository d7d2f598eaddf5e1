"""The learner's attention kernel written out plainly, for tests without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from toolwise.learner.tree_attention import AttentionPart, FlashKernel


class PlainKernel(FlashKernel):
    """The kernel, written out plainly."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs, sums = [], []
        for q, k, v in self._each(query, key, value, part):
            scores = self._scores(q, k, part, scale)
            outs.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
            sums.append(torch.logsumexp(scores, -1))
        return torch.cat(outs), torch.cat(sums, 1)

    def backward(
        self,
        grad: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        part: AttentionPart,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The flash backward: weights come from the log-sum-exp passed in, which need not be this part's own."""
        query, key, value = states
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        lengths = part.cu_seqlens_q.diff().tolist()
        groups = query.shape[1] // key.shape[1]
        given = zip(grad.split(lengths), out.split(lengths), lse.split(lengths, 1), strict=True)
        for (q, k, v), (g, o, log_sum) in zip(self._each(query, key, value, part), given, strict=True):
            weights = torch.exp(self._scores(q, k, part, scale) - log_sum[:, :, None])
            g, o = g.transpose(0, 1), o.transpose(0, 1)
            inner = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
            for to, made in zip(
                found, (inner @ k, inner.transpose(1, 2) @ q, weights.transpose(1, 2) @ g), strict=True
            ):
                to.append(made.transpose(0, 1))
        of_query, of_key, of_value = map(torch.cat, found)
        few = [x.view(len(x), key.shape[1], groups, -1).sum(2) for x in (of_key, of_value)]
        return of_query, few[0], few[1]

    def _each(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        groups = query.shape[1] // key.shape[1]
        queries, keys = part.cu_seqlens_q.diff().tolist(), part.cu_seqlens_k.diff().tolist()
        split = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
        return [
            (
                q.transpose(0, 1),
                k.transpose(0, 1).repeat_interleave(groups, 0),
                v.transpose(0, 1).repeat_interleave(groups, 0),
            )
            for q, k, v in split
        ]

    def _scores(self, q: Tensor, k: Tensor, part: AttentionPart, scale: float) -> Tensor:
        scores = q @ k.transpose(1, 2) * scale
        return scores.masked_fill(~torch.ones_like(scores[0]).tril().bool(), -torch.inf) if part.causal else scores
