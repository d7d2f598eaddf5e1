"""Replies that follow a grammar (a JSON schema, a regular expression, Lark), through llguidance: an extra.

    Vocabulary(tokenizer) ─► compile(Grammar) ─► Constraint.mask(sampling) ─► Engine.generate(logits_mask=…)

A tokenizer's tables are built once, a grammar is compiled once, and each request gets a state of its own which moves on
token by token. The end of a turn is allowed only where the grammar may end.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from toolwise.config.schema import GrammarConfig
from toolwise.errors import MissingExtraError, ModelError, PolicyError
from toolwise.protocols import Sampling

log = logging.getLogger("toolwise.engine")
Language = Literal["json_schema", "regex", "lark"]
WHITE_SPACE = " ?"
"""Between the parts of JSON: with more of it a small model may go on for ever. A schema's "x-guidance" may say else."""

MAX_COMPILED = 256
"""Grammars that are kept: tools may be others with each task."""


class GrammarError(PolicyError):
    """A grammar that cannot be followed; the message says which, where in it, and why."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply may be: `text` in one of three languages, `source` where it came from."""

    language: Language
    text: str
    source: str = "the grammar"

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool, source: str = "the JSON schema") -> Grammar:
        return cls("json_schema", json.dumps(schema, ensure_ascii=False), source)

    @classmethod
    def regex(cls, pattern: str, source: str = "the regex") -> Grammar:
        """The whole reply must match, in the syntax of Rust's regular expressions: no look-around, no references."""
        return cls("regex", pattern, source)

    @classmethod
    def lark(cls, text: str, source: str = "the grammar") -> Grammar:
        """Lark as llguidance reads it: `start` is the reply, <name> one of the tokenizer's own tokens."""
        return cls("lark", text, source)


def grammar_from_config(settings: GrammarConfig) -> Grammar | Literal["tool_calls"] | None:
    """What `rollout.grammar` asks for; None where it asks for nothing."""
    if settings.tool_calls:
        return "tool_calls"
    if settings.regex:
        return Grammar.regex(settings.regex, "rollout.grammar.regex")
    for language, path in (("json_schema", settings.json_schema), ("lark", settings.lark)):
        if path is not None:
            return Grammar("lark" if language == "lark" else "json_schema", _read(path, language), str(path))
    return None


def _read(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise GrammarError(f"rollout.grammar.{key}: {path} cannot be read ({reason})") from None


class Vocabulary:
    """A tokenizer's tables, built once (a second for 150,000 tokens), and the grammars compiled over them."""

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        """`size` is the model's vocabulary, which may have more tokens than the tokenizer knows."""
        self.size = len(tokenizer) if size is None else size
        self._library = _llguidance()
        self._ll_tokenizer = _ll_tokenizer(self._library, tokenizer, self.size)
        self._compiled: dict[Grammar, Constraint] = {}

    def compile(self, grammar: Grammar) -> Constraint:
        """Ready for any number of requests; the same one where it was compiled not long before."""
        if grammar not in self._compiled:
            if len(self._compiled) >= MAX_COMPILED:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = Constraint(self._matcher(grammar), self._ll_tokenizer.eos_tokens, self.size)
        return self._compiled[grammar]

    def _matcher(self, grammar: Grammar) -> Any:
        matcher = self._library.LLMatcher
        if grammar.language == "json_schema":
            _check_schema(grammar)
            translated = matcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": WHITE_SPACE})
        else:
            translated = getattr(matcher, f"grammar_from_{grammar.language}")(grammar.text)
        found = matcher(self._ll_tokenizer, translated, log_level=0)
        if found.is_error():
            raise GrammarError(f"{grammar.source}: {_grammar_error_message(grammar, found.get_error())}")
        trial = found.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise GrammarError(f"{grammar.source}: no reply at all follows it, {_first_line(trial.get_error())}")
        for warning in found.get_grammar_warnings():
            log.warning("%s: %s", grammar.source, _first_line(warning))
        return found


class Constraint:
    """A compiled grammar, which begins anew for each request."""

    def __init__(self, matcher: Any, ends: Sequence[int], size: int) -> None:
        self._matcher, self._ends, self._size = matcher, tuple(ends), size

    def mask(self, sampling: Sampling) -> GrammarMask:
        """For one request. A reply ends with one of the sampling's stop tokens, where the grammar may end."""
        stops = sampling.stop_token_ids
        if not stops or not 0 <= min(stops) <= max(stops) < self._size:
            raise GrammarError(
                f"a reply under a grammar ends with a stop token of the model's {self._size}, and stop_token_ids are "
                f"{list(stops)}: name the one that ends a turn"
            )
        return GrammarMask(self._matcher.deep_copy(), stops, self._ends, self._size)


class GrammarMask:
    """One request's place in its grammar; called with all that it has sampled, reads what is new."""

    def __init__(self, state: Any, stops: Sequence[int], ends: Sequence[int], size: int) -> None:
        self._state, self._stops, self._size = state, tuple(stops), size
        self._other_eos = [end for end in ends if end not in self._stops]
        """What ends a text for the tokenizer and not for this request."""
        self._consumed = 0

    def __call__(self, sampled: Sequence[int]) -> Tensor:
        if len(sampled) < self._consumed:
            raise GrammarError("a mask belongs to one request: take another from the constraint")
        if not self._state.consume_tokens(list(sampled[self._consumed :])):
            raise GrammarError(f"a token is not what the grammar allowed: {_first_line(self._state.get_error())}")
        self._consumed = len(sampled)
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            raise GrammarError(f"the grammar leads nowhere from here: {_first_line(self._state.get_error())}")
        may = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        may[self._other_eos] = False
        for stop in self._stops:
            may[stop] = self._may_end(stop, named=bool(may[stop]))
        return torch.from_numpy(may)

    def _may_end(self, stop: int, *, named: bool) -> bool:
        """Where the grammar is done, or would be with this token, which it names itself."""
        if self._state.is_accepting() or not named:
            return bool(self._state.is_accepting())
        after = self._state.deep_copy()
        return bool(after.consume_token(stop) and after.is_accepting())


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("llguidance", "grammar") from None
    return llguidance


class _TokenizerAdapter:
    """What llguidance asks of a tokenizer: the bytes of each token, and how a text is cut into tokens.

    Its own reader takes <tool_call> in a text for the token of that name, which no text may become, and then stumbles
    over it: such a text is cut otherwise.
    """

    bos_token_id = None

    def __init__(self, own: Any, added: Sequence[str]) -> None:
        self._own = own
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self.eos_token_id: int = own.eos_token
        self.tokens = [own.decode_bytes([token]) for token in range(own.vocab_size)]
        self.special_token_ids = [token for token in range(own.vocab_size) if own.is_special_token(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # so is asked which of the two it takes
            raise TypeError("a text, not bytes")
        cut: list[int] = self._own.greedy_tokenize(text) if self._added.search(text) else self._own.tokenize_str(text)
        return cut


def _ll_tokenizer(library: Any, tokenizer: Any, size: int) -> Any:
    try:
        from llguidance.hf import from_tokenizer

        own = from_tokenizer(tokenizer, n_vocab=size)
        words = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        tokens = library.TokenizerWrapper(_TokenizerAdapter(own, [word for word in words if word]))
        return library.LLTokenizer(tokens, n_vocab=size, eos_token=own.eos_tokens)
    except Exception as fault:  # whatever it stumbles over
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ModelError(
            f"llguidance cannot read the tokenizer of {name}, and a grammar needs it: {_first_line(str(fault))} "
            "(a fast tokenizer over bytes is wanted)"
        ) from fault


def _check_schema(grammar: Grammar) -> None:
    """llguidance says what is wrong with a schema, and not where."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as fault:
        raise GrammarError(f"{grammar.source} is no JSON: {fault}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError(
            f"{grammar.source}: a JSON schema is an object, true or false, not {_first_line(str(schema))}"
        )
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as fault:
        raise GrammarError(f"{grammar.source}: at {fault.json_path}: {_first_line(fault.message)}") from None


def _grammar_error_message(grammar: Grammar, error: str) -> str:
    """llguidance's error in one line, with its place."""
    reason = _first_line(error)
    if grammar.language == "json_schema":
        keys = re.findall(r'"([^"]+)"', reason) if reason.startswith("Unimplemented keys") else []
        places = [place for place, key in _schema_keys(json.loads(grammar.text), "$") if key in keys]
        return f"at {places[0]}: {reason}" if places else reason
    if grammar.language == "regex":
        # "    a(b", "     ^", "error: unclosed group": the pattern and the caret under it are indented by four
        told = re.search(r"^ {4}( *)\^+\s*\nerror: (.*)$", error, re.MULTILINE)
        return f"at character {len(told[1]) + 1} of {grammar.text!r}: {told[2]}" if told else reason
    place = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", reason)
    return f"line {place[1]}, column {place[2]}: {place[3]}" if place else reason


def _schema_keys(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    for key, value in schema.items() if isinstance(schema, dict) else ():
        yield f"{path}.{key}", key
        yield from _schema_keys(value, f"{path}.{key}")
    for place, value in enumerate(schema if isinstance(schema, list) else ()):
        yield from _schema_keys(value, f"{path}[{place}]")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
