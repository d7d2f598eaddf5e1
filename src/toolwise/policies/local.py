"""The policy in this process: shares the learner's own model, and gathers waiting requests into one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from toolwise.errors import ContextFullError, PolicyError
from toolwise.messages import Message
from toolwise.policies.decoding import generate_batch
from toolwise.protocols import Generation, Metrics, Sampling
from toolwise.rollout.chat import ChatTokenizer
from toolwise.rollout.parsers import PARSERS, Parsed, sniff, to_action
from toolwise.rollout.tokens import OnChange, TokenBuffer

_Waiting = tuple[Sequence[int], Sampling, "asyncio.Future[Generation]"]


class LocalPolicy:
    """`generate` over tokens; `session` for an episode over messages. `version` counts weight updates."""

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        sampling: Sampling,
        *,
        parser: str = "hermes",
        max_batch: int = 256,
        on_change: OnChange = "append",
    ) -> None:
        self.model = model
        self.chat = chat
        self.sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or (chat.end_id,))
        self.parse = _parser(parser, chat)
        self.on_change = on_change
        self.max_batch = max_batch
        self.max_context = int(getattr(model.config, "max_position_embeddings", 0)) or 1 << 30
        self.vocabulary = int(getattr(model.config, "vocab_size", 0)) or 1 << 30
        self.version = 0
        self.linger_s = 0.002
        self._waiting: list[_Waiting] = []
        self._serving: asyncio.Task[None] | None = None
        # A thread of its own: tools that hang in the loop's shared ones must not keep the model from working.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolwise-generate")

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self._check(token_ids, sampling)
        if len(token_ids) + sampling.max_new_tokens > self.max_context:
            raise ContextFullError(
                f"a prompt of {len(token_ids)} tokens and {sampling.max_new_tokens} new ones do not fit the model's "
                f"{self.max_context}: shorten the prompt or lower rollout.max_new_tokens"
            )
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, sampling, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await future

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Refuse alone what would bring down the whole batch it is in."""
        if not token_ids:
            raise PolicyError("a prompt of no tokens: give at least one message, or prompt_ids that are not empty")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
            raise PolicyError(
                f"prompt_ids name tokens outside the model's {self.vocabulary}: are they another model's?"
            )
        if sampling.max_new_tokens < 1 or not sampling.temperature > 0:
            raise PolicyError("max_new_tokens must be at least 1 and temperature above 0 (do_sample=False is greedy)")

    async def _serve(self) -> None:
        """Take whoever waits, as one batch, until nobody does."""
        while True:
            await self._gather()
            waiting = [w for w in self._waiting if not w[2].done()]
            batch, self._waiting = waiting[: self.max_batch], waiting[self.max_batch :]
            if not batch:
                return
            prompts, samplings, futures = zip(*batch, strict=True)
            work = partial(
                generate_batch,
                self.model,
                prompts,
                samplings,
                pad_id=self.chat.pad_id,
                policy_version=self.version,
            )
            try:
                results = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            except Exception as fault:  # every requester hears of it; none waits for ever
                for future in futures:
                    if not future.done():
                        future.set_exception(PolicyError(f"generation failed: {type(fault).__name__}: {fault}"))
                continue
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def _gather(self) -> None:
        """Let everyone who is about to ask do so: wait while more keep coming. A batch costs far more than this."""
        await asyncio.sleep(0)
        count = -1
        while count < len(self._waiting) < self.max_batch:
            count = len(self._waiting)
            await asyncio.sleep(self.linger_s)

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> LocalSession:
        return LocalSession(self, replace(self.sampling, seed=seed, do_sample=do_sample), prompt_ids)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """One decision without an episode around it."""
        session = self.session(seed=self.sampling.seed, do_sample=self.sampling.do_sample)
        return await session.get_action(observation, available_tools_specs)

    def metrics(self) -> Metrics:
        return {"policy/version": float(self.version)}


def _parser(name: str, chat: ChatTokenizer) -> Callable[[str], Parsed]:
    """How to read what the model writes; `auto` asks its chat template."""
    if name == "auto":
        name = sniff(chat.tokenizer.chat_template, chat.controls.texts)
    if name not in PARSERS:
        raise PolicyError(f"there is no tool parser {name!r}; there is: {', '.join(sorted(PARSERS))}")
    return PARSERS[name]


class LocalSession:
    """One episode: what the policy sampled, kept as it was sampled. A turn that failed can be asked for again."""

    def __init__(self, policy: LocalPolicy, sampling: Sampling, prompt_ids: Sequence[int] | None) -> None:
        self.policy = policy
        self.sampling = sampling
        self.tokens = TokenBuffer(policy.chat, prompt_ids=prompt_ids, on_change=policy.on_change)
        self._turn = 0

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        prompt = self.tokens.prompt(observation, available_tools_specs)
        # A seed of its own for each turn: positions begin anew with each generation.
        sampling = replace(self.sampling, seed=(self.sampling.seed * 1_000_003 + self._turn) & 0x7FFF_FFFF_FFFF_FFFF)
        result = await self.policy.generate(prompt, sampling)
        stops = sampling.stop_token_ids
        alignment = self.tokens.add(result.token_ids, closed=bool(result.token_ids) and result.token_ids[-1] in stops)
        self._turn += 1
        text = self.policy.chat.decode(result.token_ids, stops)
        content, calls = self.policy.parse(text)
        logprobs = {
            "token_ids": result.token_ids,
            "logprobs": result.logprobs,
            "prompt_ids": prompt,
            "finish_reason": "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason,
            "policy_version": result.policy_version,
            "alignment": alignment,
        }
        return to_action(content, calls), text, logprobs, None
