"""The policy in this process: an engine over the learner's own model, and an episode's tokens kept as they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from toolwise.engine import Engine, supports_paged_attention
from toolwise.engine.grammar import Constraint, Grammar, Vocabulary
from toolwise.errors import ContextFullError, PolicyError
from toolwise.messages import Message
from toolwise.policies.call_grammar import calls_grammar
from toolwise.policies.transformers_generation import BatchGenerator
from toolwise.protocols import Generation, Metrics, Sampling
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.parsers import PARSERS, ParsedReply, detect_parser, to_action
from toolwise.rollout.tokens import OnChange, TokenBuffer
from toolwise.rollout.tool_prompt import ToolPromptMode

log = logging.getLogger("toolwise.policies")


class GenerationEngine(Protocol):
    """What draws the tokens: our engine, transformers' batches, or a vLLM server."""

    version: int

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation: ...

    def weights_changed(self, version: int) -> None: ...


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
        engine: Literal["toolwise", "transformers"] | GenerationEngine = "toolwise",
        deterministic: bool = False,
        cache_mb: int | None = None,
        grammar: Grammar | Literal["tool_calls"] | None = None,
        tool_prompt: ToolPromptMode = "auto",
    ) -> None:
        """`engine` "transformers" takes any model, in batches that end together; `deterministic` makes what "toolwise"
        gives a request the same to the bit whatever else runs, `cache_mb` is the size of its cache. Any other generator
        must draw from `model`'s weights. `grammar` is what every turn of a session must follow;
        "tool_calls" holds the calls of a turn to the tools on offer."""
        self.model = model
        self.chat = chat
        self.sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or (chat.end_id,))
        self.parse = _find_parser(parser, chat)
        chat.set_tool_prompt(tool_prompt, parser)
        self.on_change = on_change
        self.vocabulary = int(getattr(model.config, "vocab_size", 0)) or 1 << 30
        self.max_batch = max_batch
        self.engine: GenerationEngine = (
            _build_engine(engine, model, chat, max_batch, deterministic, cache_mb)
            if isinstance(engine, str)
            else engine
        )
        self._grammar = grammar
        self._grammar_vocabulary = None if grammar is None else self._build_vocabulary()
        self.constraint()  # what is wrong with the grammar is told now
        room = (getattr(model.config, "max_position_embeddings", 0), getattr(self.engine, "max_context", 0))
        self.max_context = min((int(tokens) for tokens in room if tokens), default=1 << 30)

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.weights_changed(version)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, constraint: Constraint | None = None
    ) -> Generation:
        token_ids = list(token_ids)  # gone through several times from here on, which a prefix of a buffer makes slow
        self._check(token_ids, sampling)
        if len(token_ids) + sampling.max_new_tokens > self.max_context:
            raise ContextFullError(
                f"a prompt of {len(token_ids)} tokens and {sampling.max_new_tokens} new ones do not fit the model's "
                f"{self.max_context}: shorten the prompt or lower rollout.max_new_tokens"
            )
        if constraint is None:
            return await self.engine.generate(token_ids, sampling)
        assert isinstance(self.engine, Engine)
        return await self.engine.generate(token_ids, sampling, logits_mask=constraint.mask(sampling))

    def constraint(self, tools: Sequence[dict[str, Any]] | None = None) -> Constraint | None:
        """What a turn with these tools must follow."""
        grammar = self._grammar
        if grammar == "tool_calls":
            grammar = calls_grammar(self.chat.tokenizer, tools) if tools else None
        return (
            None if grammar is None or self._grammar_vocabulary is None else self._grammar_vocabulary.compile(grammar)
        )

    def _build_vocabulary(self) -> Vocabulary:
        if not isinstance(self.engine, Engine):
            raise PolicyError(
                f"a grammar needs our own engine, and {type(self.engine).__name__} generates: leave it out, or "
                'set rollout.engine = "toolwise" with a model that it can run'
            )
        if self._grammar == "tool_calls" and self.parse is not PARSERS["hermes"]:
            raise PolicyError('a grammar of tool calls is for the form of hermes: set rollout.tool_parser = "hermes"')
        return Vocabulary(self.chat.tokenizer, self.vocabulary)

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

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> LocalSession:
        return LocalSession(self, replace(self.sampling, seed=seed, do_sample=do_sample), prompt_ids)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """One decision without an episode around it."""
        session = self.session(seed=self.sampling.seed, do_sample=self.sampling.do_sample)
        return await session.get_action(observation, available_tools_specs)

    def metrics(self) -> Metrics:
        own: Metrics = self.engine.metrics() if hasattr(self.engine, "metrics") else {}
        return {"policy/version": float(self.version)} | own

    def close(self) -> None:
        """Ends what the engine has started outside this process."""
        if hasattr(self.engine, "close"):
            self.engine.close()


def _build_engine(
    name: str, model: Any, chat: ChatTokenizer, max_batch: int, deterministic: bool, cache_mb: int | None
) -> Engine | BatchGenerator:
    if name == "toolwise" and supports_paged_attention(model):
        return Engine(
            model, memory_mb=cache_mb, max_requests=max_batch, deterministic=deterministic, decode=chat.decode
        )
    if name == "toolwise":
        log.warning("%s cannot run in the engine: generating with transformers", type(model).__name__)
    return BatchGenerator(model, chat.pad_id, max_batch)


def _find_parser(name: str, chat: ChatTokenizer) -> Callable[[str], ParsedReply]:
    """How to read what the model writes; `auto` asks its chat template."""
    if name == "auto":
        name = detect_parser(chat.tokenizer.chat_template, chat.controls.texts)
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
        constraint = self.policy.constraint(available_tools_specs)
        held = {} if constraint is None else {"constraint": constraint}
        result = await self.policy.generate(prompt, sampling, **held)
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
