"""The thoughts of the other levels: written by the policy itself from the same history with the level forced, and cut
before the action. The writer never sees the action: a thought written backwards from it would prove nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from toolwise.errors import ContextFullError, PolicyError, ToolwiseError
from toolwise.protocols import Generation, Sampling
from toolwise.thinking.levels import END_THINK, Level, Levels
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.reply import FormatFault, parse_reply
from toolwise.thinking.thinking_model import ThinkingModel
from toolwise.thinking.token_spans import token_spans
from toolwise.types import Alternative

FAILURE_OF_FAULT = {
    FormatFault.UNCLOSED_THOUGHT: "unclosed",
    FormatFault.EMPTY_THOUGHT: "empty",
}


_CLOSING = re.compile(re.escape(END_THINK), re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"\w", re.ASCII)


class Codec(Protocol):
    """Text to tokens and back; `ChatTokenizer` is one."""

    end_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str: ...


class LeakError(PolicyError):
    """A thought whose writer saw more than the history and its level."""


@dataclass(frozen=True, slots=True)
class AlternativeWriter:
    """Writes alternatives; all that are asked for at once are generated together."""

    model: ThinkingModel
    codec: Codec
    levels: Levels
    sampling: Sampling
    """`max_new_tokens` is the longest thought; its seed is that of the run."""

    def other_levels(self, step: ParsedStep) -> list[Level]:
        """The levels that the policy did not use."""
        return [level for level in self.levels if level.number != step.reading.level]

    def max_tokens_for(self, step: ParsedStep) -> int:
        """Tokens that a step's alternatives may take at most."""
        return self.sampling.max_new_tokens * sum(level.thinks for level in self.other_levels(step))

    async def write(self, steps: Sequence[ParsedStep], *, training_step: int = 0) -> list[tuple[Alternative, ...]]:
        """For each step one alternative for every level it did not use, failed ones included."""
        asked = [(step, level) for step in steps for level in self.other_levels(step)]
        found = iter(await asyncio.gather(*(self._write(step, level, training_step) for step, level in asked)))
        return [tuple(next(found) for _ in self.other_levels(step)) for step in steps]

    async def _write(self, step: ParsedStep, level: Level, training_step: int) -> Alternative:
        opening = self.codec.encode(level.opening)
        prompt = [*step.history, *opening]
        if not level.thinks:
            return Alternative(level.number, prompt, len(opening), opening, text=level.opening)
        sampling = replace(
            self.sampling,
            seed=_seed(self.sampling.seed, training_step, step, level),
            stop_token_ids=self._stop_token_ids,
        )
        try:
            generation = await self.model.generate(prompt, sampling)
        except ContextFullError:
            return Alternative(level.number, prompt, failure="context_full")
        except ToolwiseError:
            return Alternative(level.number, prompt, failure="fault")
        return check_no_leak(step, self._parse_thought(level, prompt, opening, generation), opening)

    @property
    def _stop_token_ids(self) -> tuple[int, ...]:
        """Where the end of a thought is one token, nothing beyond it need be written."""
        close = self.codec.encode(END_THINK)
        return (self.codec.end_id, *(close if len(close) == 1 else ()))

    def _parse_thought(
        self, level: Level, prompt: list[int], opening: list[int], generation: Generation
    ) -> Alternative:
        """The level and the thought without what follows them."""
        ids = [*opening, *generation.token_ids]
        if ids[-1] == self.codec.end_id:
            ids.pop()
        made = Alternative(
            level.number,
            prompt,
            len(opening),
            generated_tokens=len(generation.token_ids),
            policy_version=generation.policy_version,
        )
        text = self.codec.decode(ids)
        closing = _CLOSING.search(text, len(level.opening))
        end = closing.end() if closing else len(text)
        reading = parse_reply(text[:end])
        faults = [fault for fault in reading.faults if fault is not FormatFault.NO_ACTION]
        if faults:
            too_long = faults[0] is FormatFault.UNCLOSED_THOUGHT and generation.finish_reason == "length"
            return replace(made, failure="too_long" if too_long else FAILURE_OF_FAULT.get(faults[0], "malformed"))
        if reading.level != level.number or reading.thought is None:
            return replace(made, failure="malformed")
        spans = token_spans(ids, self.codec.decode, reading)
        head = ids[: len(spans.head)]
        return replace(
            made,
            head_ids=head,
            logprobs=list(generation.logprobs)[: len(head) - len(opening)],
            text=text[:end],
            thought=reading.thought,
            thinking_tokens=len(spans.thought),
        )


def check_no_leak(step: ParsedStep, alternative: Alternative, opening: Sequence[int]) -> Alternative:
    """The alternative, if its writer was given the history and the forced level and nothing else."""
    if list(alternative.prompt_ids) != [*step.history, *opening]:
        raise LeakError(
            f"rollout {step.rollout_id}, step {step.index}, level {alternative.level}: the thought was not written "
            "from the history and its level alone, so that it proves nothing: prompt with exactly these tokens"
        )
    return alternative


def mentions_action(thought: str | None, action: str | None) -> bool:
    """Whether a thought says the action, white space and case aside."""
    if not thought or not action:
        return False
    said, wanted = (" ".join(text.casefold().split()) for text in (thought, action))
    return any(
        not _WORD.fullmatch(said[max(0, at - 1) : at]) and not _WORD.match(said, at + len(wanted))
        for at in _occurrences(wanted, said)
    )


def _occurrences(wanted: str, said: str) -> Iterator[int]:
    """Wherever `wanted` begins in `said`, overlaps included, in linear time (Knuth, Morris and Pratt)."""
    if not wanted or wanted not in said:
        return
    borders, length = [0], 0
    for letter in wanted[1:]:
        while length and letter != wanted[length]:
            length = borders[length - 1]
        length += letter == wanted[length]
        borders.append(length)
    length = 0
    for at, letter in enumerate(said):
        while length and letter != wanted[length]:
            length = borders[length - 1]
        length += letter == wanted[length]
        if length == len(wanted):
            yield at + 1 - length
            length = borders[length - 1]


def _seed(seed: int, training_step: int, step: ParsedStep, level: Level) -> int:
    """A draw of its own for each alternative, the same in the same run."""
    name = f"{seed}/{training_step}/{step.rollout_id}/{step.index}/{level.number}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
