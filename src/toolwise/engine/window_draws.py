"""Draws the tokens of a window of decode steps: the requests themselves get them when the window ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from toolwise.engine import sampler
from toolwise.engine.request import Request

HasStopString = Callable[[Request, Sequence[int]], bool]
"""Whether the last of a request's new tokens completes one of its stop strings."""


class WindowDraws:
    def __init__(self, requests: Sequence[Request], has_stop_string: HasStopString) -> None:
        self.requests = requests
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        """Per request, like the tokens."""
        self._samplings, self._options = [r.sampling for r in requests], [r.options for r in requests]
        self._sampled = [request.sampled for request in requests]
        self._stops = [(row, s.stop_token_ids) for row, s in enumerate(self._samplings) if s.stop_token_ids]
        self._with_strings = [row for row, request in enumerate(requests) if request.stop_strings]
        self._has_stop_string = has_stop_string
        self._plain = not any(r.logits_mask is not None or r.options.top_logprobs for r in requests)

    def draw(self, logits: Tensor) -> list[int]:
        """The next token of each request."""
        if self._plain:
            positions = [count + len(self.tokens[0]) for count in self._sampled]
            drawn = sampler.draw(logits, self._samplings, positions, options=self._options)
            ids, logprobs = drawn[0].tolist(), drawn[1].tolist()
        else:
            samples = sampler.sample(logits, self.requests, self.tokens)
            ids, logprobs = [token for token, _ in samples], [logprob for _, logprob in samples]
        for row, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
        return ids

    @property
    def ended(self) -> bool:
        """Whether a request has stopped with its last token, or has a fault."""
        if any(self.tokens[row][-1] in stops for row, stops in self._stops):
            return True
        if any(self._has_stop_string(self.requests[row], self.tokens[row]) for row in self._with_strings):
            return True
        return any(request.fault is not None for request in self.requests)
