"""A real model and tokenizer, replies at each level as if sampled, and various alternative writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from toolwise.config.schema import ActorConfig
from toolwise.learner.continuation_scores import ContinuationScorer
from toolwise.messages import Message
from toolwise.protocols import Generation, Sampling
from toolwise.thinking.alternatives import AlternativeWriter
from toolwise.thinking.levels import DEFAULT_LEVELS
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.thinking.step_selection import parse_step
from toolwise.thinking.thinking_model import ScoringRequest, TokenScores
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, Usage

torch.set_num_threads(1)
REPLY = "<level>3</level><think>I look for the key</think><action>go left</action>"
THOUGHTS = {2: "State: a hall</think>", 3: "State: a hall Goal: out</think>", 4: "Weigh: the left door or not</think>"}


@cache
def small() -> tuple[Any, Any]:
    """(model, chat tokenizer)"""
    from toolwise.models import load_model

    return load_model("builtin:small", device="cpu", dtype="float32")


@cache
def exact() -> Any:
    """The same model in float64."""
    return deepcopy(small()[0]).double()


def exact_logprobs(prefix: Sequence[int], ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probs of all tokens at each of `ids`: one sequence at a time, in float64, no padding, packing or cache."""
    with torch.no_grad():
        logits = exact()(input_ids=torch.tensor([[*prefix, *ids]])).logits[0, len(prefix) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def teacher_forced(prefix: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The exact log-probs, the reference for all others."""
    return exact_logprobs(prefix, ids, temperature).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def entropies(prefix: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    logp = exact_logprobs(prefix, ids, temperature)
    return (-(logp.exp() * logp).sum(-1)).tolist()


def history(words: str = "You are in a hall.") -> list[int]:
    _, chat = small()
    return list(chat.start([Message(role="user", content=words)]))


def step_data(reply: str = REPLY, *, before: Sequence[int] | None = None, index: int = 0, **info: Any) -> StepData:
    """A step whose tokens have the model's log-probs."""
    _, chat = small()
    seen = list(before if before is not None else history())
    ids = [*chat.encode(reply), chat.end_id]
    return StepData(
        system_step_index=index,
        observation_data=[Message(role="user", content="?")],
        action_taken={"type": "text", "content": reply},
        raw_policy_output=reply,
        resulting_messages_history=[],
        policy_logprobs={
            "prompt_ids": seen,
            "token_ids": ids,
            "logprobs": teacher_forced(seen, ids),
            "finish_reason": "stop",
            "policy_version": 0,
        },
        step_info=info,
    )


def read(reply: str = REPLY, *, rollout: str = "r", group: str = "g", index: int = 0, **info: Any) -> ParsedStep:
    _, chat = small()
    return parse_step(rollout, group, index, step_data(reply, index=index, **info), chat)


def scored(
    score: float, replies: Sequence[str] = (REPLY,), *, name: str = "r", group: str = "g", **info: Any
) -> ScoredRollout:
    steps = tuple(step_data(reply, index=i, **info) for i, reply in enumerate(replies))
    task = Task(task_id=group, prompt=[Message(role="user", content="?")])
    tokens = sum(len(step.policy_logprobs["token_ids"]) for step in steps if step.policy_logprobs)
    usage = Usage(sampled_tokens=tokens)
    rollout = Rollout(name, group, 0, 0, task, None, steps, task.prompt, StopReason.ENV_DONE, usage)
    return ScoredRollout(rollout, EvaluateResult(score=score), steps)


@dataclass
class ScriptedThinker:
    """Writes given words at each level, with the model's log-probs; scores with the model itself.

    `peek` tokens are inserted after the history: a writer that sees more than it should."""

    words: Mapping[int, str] = field(default_factory=lambda: THOUGHTS)
    peek: str = ""
    asked: list[list[int]] = field(default_factory=list)
    scorings: int = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        _, chat = small()
        self.asked.append(list(token_ids))
        level = next(k for k in (2, 3, 4) if chat.decode(token_ids).endswith(f"<level>{k}</level><think>"))
        ids = chat.encode(self.words[level])[: sampling.max_new_tokens]
        for place, token in enumerate(ids):
            if token in sampling.stop_token_ids:
                ids = ids[: place + 1]
                break
        cut = len(chat.encode(DEFAULT_LEVELS.by_number(level).opening))
        seen = [*token_ids[:-cut], *chat.encode(self.peek), *token_ids[-cut:]] if self.peek else token_ids
        ended = bool(ids) and ids[-1] in sampling.stop_token_ids
        return Generation(ids, teacher_forced(seen, ids, sampling.temperature), "stop" if ended else "length", 0)

    async def score(self, contexts: Sequence[ScoringRequest], temperature: float) -> list[tuple[TokenScores, ...]]:
        self.scorings += 1
        return ContinuationScorer(small()[0], ActorConfig())(contexts, temperature)

    def counters(self) -> dict[str, float]:
        return {}


def writer(model: Any = None, **sampling: Any) -> AlternativeWriter:
    return AlternativeWriter(
        model or ScriptedThinker(), small()[1], DEFAULT_LEVELS, Sampling(**({"max_new_tokens": 40} | sampling))
    )
