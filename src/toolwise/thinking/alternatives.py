"""Generates thoughts at the levels a step did not use: sampled from the policy, after the same history, with the level
forced, and cut before the action. The prompt never contains the action, since a thought that rationalises it afterwards
would say nothing about the value of thinking.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from toolwise.errors import ContextFullError, PolicyError, ToolwiseError
from toolwise.protocols import Generation, Sampling
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.thinking.levels import END_THINK, Level, Levels
from toolwise.thinking.parsed_step import ParsedStep, token_spans
from toolwise.thinking.reply import FormatFault, parse_reply
from toolwise.thinking.thinking_model import ThinkingModel
from toolwise.types import Alternative

FAILURE_OF_FAULT: dict[FormatFault | None, str] = {
    FormatFault.UNCLOSED_THOUGHT: "unclosed",
    FormatFault.EMPTY_THOUGHT: "empty",
}
_CLOSING = re.compile(re.escape(END_THINK), re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"\w", re.ASCII)


def without_end(ids: Sequence[int], codec: ChatTokenizer) -> list[int]:
    """The tokens before the one that ends a turn."""
    return list(ids[:-1] if len(ids) and ids[-1] in codec.stop_ids else ids)


class LeakError(PolicyError):
    """An alternative thought was generated from more than the history and its level."""


@dataclass(frozen=True, slots=True)
class AlternativeWriter:
    """Generates alternatives; those of one call run concurrently."""

    model: ThinkingModel
    codec: ChatTokenizer
    levels: Levels
    sampling: Sampling
    """`max_new_tokens` limits the thought; `seed` is the run's."""

    def other_levels(self, step: ParsedStep) -> list[Level]:
        return [level for level in self.levels if level.number != step.reply.level]

    def max_tokens_for(self, step: ParsedStep) -> int:
        """Upper bound on the tokens generated for a step's alternatives."""
        return self.sampling.max_new_tokens * sum(level.thinks for level in self.other_levels(step))

    async def write(self, steps: Sequence[ParsedStep], *, training_step: int = 0) -> list[tuple[Alternative, ...]]:
        """For each step, one alternative per level it did not use, including failed ones."""
        requests = (self._write(step, level, training_step) for step in steps for level in self.other_levels(step))
        written = iter(await asyncio.gather(*requests))
        return [tuple(next(written) for _ in self.other_levels(step)) for step in steps]

    async def _write(self, step: ParsedStep, level: Level, training_step: int) -> Alternative:
        opening = self.codec.encode(level.opening)
        prompt = [*step.history, *opening]
        if not level.thinks:
            return Alternative(level.number, prompt, len(opening), opening, text=level.opening)
        closing = self.codec.encode(END_THINK)
        sampling = replace(
            self.sampling,
            seed=_seed(self.sampling.seed, training_step, step, level),
            stop_token_ids=(*self.codec.stop_ids, *(closing if len(closing) == 1 else ())),
        )
        try:
            generation = await self.model.generate(prompt, sampling)
        except ContextFullError:
            return Alternative(level.number, prompt, failure="context_full")
        except ToolwiseError:
            return Alternative(level.number, prompt, failure="fault")
        return self._parse_thought(level, prompt, opening, generation)

    def _parse_thought(
        self, level: Level, prompt: list[int], opening: list[int], generation: Generation
    ) -> Alternative:
        ids = without_end([*opening, *generation.token_ids], self.codec)
        alternative = Alternative(
            level.number,
            prompt,
            len(opening),
            generated_tokens=len(generation.token_ids),
            policy_version=generation.policy_version,
        )
        text = self.codec.decode(ids)
        closing = _CLOSING.search(text, len(level.opening))
        end = closing.end() if closing else len(text)
        reply = parse_reply(text[:end])
        fault = next((fault for fault in reply.faults if fault is not FormatFault.NO_ACTION), None)
        if fault is FormatFault.UNCLOSED_THOUGHT and generation.finish_reason == "length":
            return replace(alternative, failure="too_long")
        if fault is not None or reply.level != level.number or reply.thought is None:
            return replace(alternative, failure=FAILURE_OF_FAULT.get(fault, "malformed"))
        spans = token_spans(ids, self.codec.decode, reply)
        head = ids[: len(spans.head)]
        return replace(
            alternative,
            head_ids=head,
            logprobs=list(generation.logprobs)[: len(head) - len(opening)],
            text=text[:end],
            thought=reply.thought,
            thinking_tokens=len(spans.thought),
        )


def mentions_action(thought: str | None, action: str | None) -> bool:
    """Whether a thought contains the action as whole words, ignoring case and white space."""
    if not thought or not action:
        return False
    haystack, needle = (" ".join(text.casefold().split()) for text in (thought, action))
    return any(
        not _WORD.fullmatch(haystack[max(0, at - 1) : at]) and not _WORD.match(haystack, at + len(needle))
        for at in _occurrences(needle, haystack)
    )


def _occurrences(phrase: str, text: str) -> Iterator[int]:
    """Start of every occurrence of `phrase` in `text`, overlaps included, in linear time (Knuth–Morris–Pratt)."""
    if not phrase or phrase not in text:
        return
    borders = [0]

    def advance(length: int, character: str) -> int:
        """The length of the longest beginning of `phrase` that ends with `character`, after one of `length`."""
        while length and character != phrase[length : length + 1]:
            length = borders[length - 1]
        return length + (character == phrase[length])

    for character in phrase[1:]:
        borders.append(advance(borders[-1], character))
    length = 0
    for index, character in enumerate(text):
        length = advance(length, character)
        if length == len(phrase):
            yield index + 1 - length


def _seed(seed: int, training_step: int, step: ParsedStep, level: Level) -> int:
    name = f"{seed}/{training_step}/{step.rollout_id}/{step.index}/{level.number}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
