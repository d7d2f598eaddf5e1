"""The in-process policy: an engine on the learner's model, and sessions that keep an episode's tokens as sampled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from toolwise.concurrency.text_threads import run_if_long
from toolwise.engine import Engine, engine_path
from toolwise.engine.grammar import Constraint, Grammar, Vocabulary
from toolwise.engine.request import NO_OPTIONS, LogitsMask, OnTokens, ServingOptions
from toolwise.errors import ContextFullError, PolicyError
from toolwise.messages import Message, Prefix, text_chars
from toolwise.policies.call_grammar import OPENING, calls_grammar
from toolwise.policies.transformers_generation import BatchGenerator
from toolwise.protocols import AgentPolicy, Generation, GenerationEngine, Metrics, Sampling
from toolwise.rollout.call_format import ParserSpec
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.parsers import PARSERS, parse_for_tools, reasoning_of, to_action
from toolwise.rollout.tokens import OnChange, TokenBuffer
from toolwise.rollout.tool_prompt import ToolPromptMode

log = logging.getLogger("toolwise.policies")


class LocalPolicy:
    """`generate` works on tokens, `session` on the messages of an episode. `version` counts weight updates."""

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        sampling: Sampling,
        *,
        parser: ParserSpec = "hermes",
        max_batch: int = 256,
        on_change: OnChange = "append",
        engine: Literal["toolwise", "transformers"] | GenerationEngine = "toolwise",
        deterministic: bool = False,
        cache_mb: int | None = None,
        grammar: Grammar | Literal["tool_calls"] | None = None,
        tool_prompt: ToolPromptMode = "auto",
    ) -> None:
        """`engine` "transformers" runs any model, in batches that end together. For "toolwise", `deterministic` makes a
        request's result bit-identical whatever else runs, and `cache_mb` is the size of its KV cache. Any other engine
        must sample from `model`'s weights. Every turn of a session follows `grammar`; "tool_calls" restricts calls to
        the available tools and their schemas."""
        self.model = model
        self.chat = chat
        self.sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or chat.stop_ids)
        self.call_format = chat.find_format(parser)
        self.parse = self.call_format.parse
        chat.set_tool_prompt(tool_prompt, self.call_format)
        self.on_change = on_change
        self.vocabulary = int(getattr(model.config, "vocab_size", 0)) or 1 << 30
        self.max_batch = max_batch
        self.engine: GenerationEngine = (
            _build_engine(engine, model, chat, max_batch, deterministic, cache_mb)
            if isinstance(engine, str)
            else engine
        )
        self.generating_s = 0.0
        """Seconds that all requests so far have spent in the engine."""
        self._grammar = grammar
        self._grammar_vocabulary = None if grammar is None else self._build_vocabulary()
        self.constraint()  # report errors in the grammar now
        limits = (getattr(model.config, "max_position_embeddings", 0), self.engine.max_context)
        self.max_context = min((int(tokens) for tokens in limits if tokens), default=1 << 30)

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.weights_changed(version)

    @property
    def has_serving_options(self) -> bool:
        """Whether the engine samples with `ServingOptions` and stop strings."""
        return isinstance(self.engine, Engine)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        constraint: Constraint | None = None,
        on_tokens: OnTokens | None = None,
        stop_strings: Sequence[str] = (),
        options: ServingOptions = NO_OPTIONS,
        logits_mask: LogitsMask | None = None,
    ) -> Generation:
        """`on_tokens` receives new tokens while they are sampled, if the engine can tell. `stop_strings` and `options`
        are for serving, and need the Toolwise engine. `logits_mask` forbids tokens, instead of a `constraint`."""
        # As a list: it is iterated several times below, which is slow on the prefix of a buffer.
        token_ids = token_ids.tolist() if isinstance(token_ids, Prefix) else list(token_ids)
        self._check(token_ids, sampling)
        if len(token_ids) + sampling.max_new_tokens > self.max_context:
            raise ContextFullError(
                f"a prompt of {len(token_ids)} tokens and {sampling.max_new_tokens} new ones do not fit the model's "
                f"context of {self.max_context}: shorten the prompt or lower rollout.max_new_tokens"
            )
        clock = asyncio.get_running_loop()
        started = clock.time()
        try:
            if not isinstance(self.engine, Engine):
                assert constraint is None
                assert logits_mask is None
                if options.truncates or options.top_logprobs or stop_strings:
                    name = type(self.engine).__name__
                    raise PolicyError(f"{name} has no top_p, top_k and stop strings: leave them out")
                return await self.engine.generate(token_ids, sampling)
            mask = logits_mask if constraint is None else constraint.mask(sampling)
            return await self.engine.generate(
                token_ids, sampling, stop_strings=stop_strings, logits_mask=mask, on_tokens=on_tokens, options=options
            )
        finally:
            self.generating_s += clock.time() - started

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    def constraint(self, tools: Sequence[dict[str, Any]] | None = None) -> Constraint | None:
        """The constraint on a turn with these tools, if any."""
        grammar = self._grammar
        if grammar == "tool_calls":
            grammar = calls_grammar(self.chat.tokenizer, tools) if tools else None
        return (
            None if grammar is None or self._grammar_vocabulary is None else self._grammar_vocabulary.compile(grammar)
        )

    @cached_property
    def call_ban(self) -> LogitsMask | None:
        """A mask without the token that begins a tool call; None if calls do not begin with one token of their own, or
        if the engine takes no mask."""
        tokens = {str(token): number for number, token in self.chat.tokenizer.added_tokens_decoder.items()}
        hermes = self.parse is PARSERS["hermes"]
        if not (hermes and OPENING in tokens and isinstance(self.engine, Engine) and self._grammar is None):
            return None
        import torch

        allowed = torch.ones(self.vocabulary, dtype=torch.bool)
        allowed[tokens[OPENING]] = False
        return lambda sampled: allowed

    def _build_vocabulary(self) -> Vocabulary:
        if not isinstance(self.engine, Engine):
            raise PolicyError(
                f"a grammar needs the Toolwise engine, but this policy uses {type(self.engine).__name__}: leave it "
                'out, or set rollout.engine = "toolwise" with a model that it supports'
            )
        if self._grammar == "tool_calls" and self.parse is not PARSERS["hermes"]:
            raise PolicyError('a grammar of tool calls needs the hermes format: set rollout.tool_parser = "hermes"')
        return Vocabulary(self.chat.tokenizer, self.vocabulary)

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Refuse a request that would make its whole batch fail."""
        if not token_ids:
            raise PolicyError("the prompt is empty: give at least one message, or non-empty prompt_ids")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
            raise PolicyError(
                f"prompt_ids contain ids outside the model's vocabulary of {self.vocabulary}: are they from another "
                "model?"
            )
        if sampling.max_new_tokens < 1 or not sampling.temperature > 0:
            raise PolicyError("max_new_tokens must be at least 1 and temperature above 0 (do_sample=False is greedy)")

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> LocalSession:
        return LocalSession(self, replace(self.sampling, seed=seed, do_sample=do_sample), prompt_ids)

    def limited(self, max_new_tokens: int) -> LimitedPolicy:
        """This policy with another limit on the length of a reply."""
        return LimitedPolicy(self, max_new_tokens)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """A single decision, outside of an episode."""
        session = self.session(seed=self.sampling.seed, do_sample=self.sampling.do_sample)
        return await session.get_action(observation, available_tools_specs)

    def metrics(self) -> Metrics:
        return {"policy/version": float(self.version)} | self.engine.metrics()

    def close(self) -> None:
        """Close the engine, which may run outside this process."""
        self.engine.close()


def _build_engine(
    name: str, model: Any, chat: ChatTokenizer, max_batch: int, deterministic: bool, cache_mb: int | None
) -> Engine | BatchGenerator:
    path, reason = engine_path(model) if name == "toolwise" else ("transformers", "")
    if path != "transformers":
        return Engine(
            model, memory_mb=cache_mb, max_requests=max_batch, deterministic=deterministic, decode=chat.decode
        )
    if name == "toolwise":
        log.warning(
            "%s is not supported by the engine: generating with transformers (%s)", type(model).__name__, reason
        )
    return BatchGenerator(model, chat.pad_id, max_batch, chat.decode)


@dataclass(frozen=True, slots=True)
class LimitedPolicy:
    """A local policy whose replies have at most `max_new_tokens` tokens, or are sampled in another way."""

    policy: LocalPolicy
    max_new_tokens: int
    temperature: float | None = None
    """None: the policy's own."""
    options: ServingOptions = NO_OPTIONS

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> LocalSession:
        session = self.policy.session(seed=seed, do_sample=do_sample, prompt_ids=prompt_ids)
        temperature = session.sampling.temperature if self.temperature is None else self.temperature
        sampling = replace(session.sampling, max_new_tokens=self.max_new_tokens, temperature=temperature)
        session.sampling = session.full_sampling = sampling
        session.options = self.options
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        sampling = self.policy.sampling
        session = self.session(seed=sampling.seed, do_sample=sampling.do_sample)
        return await session.get_action(observation, available_tools_specs)


def with_sampling(
    policy: AgentPolicy,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    options: ServingOptions = NO_OPTIONS,
) -> AgentPolicy:
    """A local policy with other sampling, for one episode that nobody learns from; any other policy as it is."""
    if not isinstance(policy, LocalPolicy | LimitedPolicy):
        return policy
    local = policy if isinstance(policy, LocalPolicy) else policy.policy
    own = local.sampling.max_new_tokens if isinstance(policy, LocalPolicy) else policy.max_new_tokens
    return LimitedPolicy(local, min(own, max_new_tokens or own), temperature, options)


class LocalSession:
    """One episode, whose tokens are kept exactly as sampled. A turn that failed can be requested again."""

    def __init__(self, policy: LocalPolicy, sampling: Sampling, prompt_ids: Sequence[int] | None) -> None:
        self.policy = policy
        self.sampling = sampling
        self.tokens = TokenBuffer(policy.chat, prompt_ids=prompt_ids, on_change=policy.on_change)
        self.on_tokens: OnTokens | None = None
        self.options = NO_OPTIONS
        """Set only where nobody learns from the episode."""
        self._turn = 0
        self.full_sampling = sampling
        """What `limit_turns` goes back to."""
        self._ban: LogitsMask | None = None

    def next_prompt(self, observation: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The tokens that the next turn would begin with."""
        return list(self.tokens.prompt(observation, tools))

    def limit_turns(self, *, max_new_tokens: int | None = None, bans_calls: bool = False) -> None:
        """Limit the turns from now on; without arguments as at the beginning."""
        if bans_calls and self.policy.call_ban is None:
            raise PolicyError("tool calls do not begin with one token of this model, so they cannot be banned")
        length = min(max_new_tokens or self.full_sampling.max_new_tokens, self.full_sampling.max_new_tokens)
        self.sampling = replace(self.full_sampling, max_new_tokens=length)
        self._ban = self.policy.call_ban if bans_calls else None

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        chars = text_chars(observation)
        prompt = await run_if_long(chars, self.tokens.prompt, observation, available_tools_specs)
        # One seed per turn: positions restart at 0 with each generation.
        sampling = replace(self.sampling, seed=(self.sampling.seed * 1_000_003 + self._turn) & 0x7FFF_FFFF_FFFF_FFFF)
        constraint = self.policy.constraint(available_tools_specs)
        extra: dict[str, Any] = {} if constraint is None else {"constraint": constraint}
        if self.on_tokens is not None:
            extra["on_tokens"] = self.on_tokens
        if self.options is not NO_OPTIONS:
            extra |= {"options": self.options, "stop_strings": self.options.stop_strings}
        if self._ban is not None:
            extra["logits_mask"] = self._ban
        result = await self.policy.generate(prompt, sampling, **extra)
        stops = sampling.stop_token_ids
        closed = bool(result.token_ids) and result.token_ids[-1] in stops
        alignment = self.tokens.add(result.token_ids, closed=closed)
        self._turn += 1
        text = self.policy.chat.decode(result.token_ids, stops)
        reply = parse_for_tools(self.policy.parse, text, available_tools_specs)
        content, calls = reply
        finish: str = result.finish_reason
        if finish == "stop" and sampling.stop_strings and not closed:
            finish = "stop_string"
        logprobs = {
            "token_ids": result.token_ids,
            "logprobs": result.logprobs,
            "prompt_ids": prompt,
            "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
            "policy_version": result.policy_version,
            "alignment": alignment,
        }
        if result.token_versions is not None:
            logprobs["token_versions"] = result.token_versions
        return to_action(content, calls, reasoning_of(reply)), text, logprobs, None
