"""Constrains replies to a grammar (a JSON schema, a regular expression, Lark) through llguidance, an optional extra.

    Vocabulary(tokenizer) ─► compile(Grammar) ─► Constraint.mask(sampling) ─► Engine.generate(logits_mask=…)

The tokenizer's tables are built once, a grammar is compiled once, and each request gets its own state, which advances
token by token. The end of a turn is allowed only where the grammar may end.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from toolwise.config.rollout import GrammarConfig
from toolwise.errors import ModelError, PolicyError, import_extra
from toolwise.protocols import Sampling

log = logging.getLogger("toolwise.engine")
Language = Literal["json_schema", "regex", "lark"]
WHITE_SPACE = " ?"
"""White space in JSON: with more, a small model may never stop. A schema's "x-guidance" overrides it."""

MAX_COMPILED = 256
"""Compiled grammars kept in the cache: each task may have other tools."""


class GrammarError(PolicyError):
    """A grammar that cannot be used; the message says which, where and why."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply may be: `text` in one of three languages; `source` says where it came from, for messages."""

    language: Language
    text: str
    source: str = "the grammar"

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool, source: str = "the JSON schema") -> Grammar:
        return cls("json_schema", json.dumps(schema, ensure_ascii=False), source)

    @classmethod
    def regex(cls, pattern: str, source: str = "the regex") -> Grammar:
        """The whole reply must match. Syntax of Rust regular expressions: no look-around, no backreferences."""
        return cls("regex", pattern, source)

    @classmethod
    def lark(cls, text: str, source: str = "the grammar") -> Grammar:
        """Lark as llguidance reads it: `start` is the reply, <name> a special token of the tokenizer."""
        return cls("lark", text, source)


def grammar_from_config(settings: GrammarConfig) -> Grammar | Literal["tool_calls"] | None:
    """The grammar configured in `rollout.grammar`, if any."""
    if settings.tool_calls:
        return "tool_calls"
    if settings.regex:
        return Grammar.regex(settings.regex, "rollout.grammar.regex")
    if settings.json_schema is not None:
        return Grammar("json_schema", _read(settings.json_schema, "json_schema"), str(settings.json_schema))
    if settings.lark is not None:
        return Grammar("lark", _read(settings.lark, "lark"), str(settings.lark))
    return None


def _read(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise GrammarError(f"rollout.grammar.{key}: {path} cannot be read ({reason})") from None


class Vocabulary:
    """A tokenizer's tables, built once (one second for 150,000 tokens), and the grammars compiled with them."""

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        """`size` is the model's vocabulary size, which may exceed the tokenizer's."""
        self.size = len(tokenizer) if size is None else size
        self._library = import_extra("llguidance", "grammar")
        self._ll_tokenizer = _ll_tokenizer(self._library, tokenizer, self.size)
        self._compiled: dict[Grammar, Constraint | str] = {}
        """Or why it cannot be used."""
        self._compiling = threading.Lock()

    def is_compiled(self, grammar: Grammar) -> bool:
        """Whether `compile` has its result already."""
        return grammar in self._compiled

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar for any number of requests, in any thread; recent ones and refusals are cached."""
        known = self._compiled.get(grammar)
        if known is None:
            with self._compiling:
                known = self._compiled.get(grammar) or self._compile_new(grammar)
        if isinstance(known, str):
            raise GrammarError(known)
        return known

    def _compile_new(self, grammar: Grammar) -> Constraint | str:
        known: Constraint | str
        try:
            known = Constraint(self._matcher(grammar), self._ll_tokenizer.eos_tokens, self.size)
        except GrammarError as refusal:
            known = str(refusal)
        if len(self._compiled) >= MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[grammar] = known
        return known

    def _matcher(self, grammar: Grammar) -> Any:
        matcher = self._library.LLMatcher
        if grammar.language == "json_schema":
            _check_schema(grammar)
            translated = matcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": WHITE_SPACE})
        else:
            translated = getattr(matcher, f"grammar_from_{grammar.language}")(grammar.text)
        compiled = matcher(self._ll_tokenizer, translated, log_level=0)
        if compiled.is_error():
            raise GrammarError(f"{grammar.source}: {_grammar_error_message(grammar, compiled.get_error())}")
        trial = compiled.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise GrammarError(f"{grammar.source}: no reply can match it: {_first_line(trial.get_error())}")
        for warning in compiled.get_grammar_warnings():
            log.warning("%s: %s", grammar.source, _first_line(warning))
        return compiled


class Constraint:
    """A compiled grammar; each request starts it from the beginning."""

    def __init__(self, matcher: Any, ends: Sequence[int], size: int) -> None:
        self._matcher, self._ends, self._size = matcher, tuple(ends), size

    def mask(self, sampling: Sampling) -> GrammarMask:
        """Create the mask of one request. Its reply ends with one of the stop tokens, where the grammar may end."""
        stops = sampling.stop_token_ids
        if not stops or not 0 <= min(stops) <= max(stops) < self._size:
            raise GrammarError(
                f"a grammar needs stop tokens from the model's vocabulary of {self._size}, but stop_token_ids are "
                f"{list(stops)}: give the token that ends a turn"
            )
        return GrammarMask(self._matcher.deep_copy(), stops, self._ends, self._size)


class GrammarMask:
    """The state of one request in its grammar. Call it with all tokens sampled so far; it consumes the new ones."""

    def __init__(self, state: Any, stops: Sequence[int], ends: Sequence[int], size: int) -> None:
        self._state, self._stops, self._size = state, tuple(stops), size
        self._other_eos = [end for end in ends if end not in self._stops]
        """Tokens that end a text for the tokenizer but not for this request."""
        self._consumed = 0

    def __call__(self, sampled: Sequence[int]) -> Tensor:
        if len(sampled) < self._consumed:
            raise GrammarError("a mask belongs to one request: create a new one with Constraint.mask()")
        if not self._state.consume_tokens(list(sampled[self._consumed :])):
            raise GrammarError(f"the grammar does not allow a sampled token: {_first_line(self._state.get_error())}")
        self._consumed = len(sampled)
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            raise GrammarError(f"the grammar allows no next token: {_first_line(self._state.get_error())}")
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)
        allowed[self._other_eos] = False
        for stop in self._stops:
            allowed[stop] = self._may_end(stop, named=bool(allowed[stop]))
        return torch.from_numpy(allowed)

    def _may_end(self, stop: int, *, named: bool) -> bool:
        """Whether the grammar is complete, or would be after this token, if the grammar itself names it."""
        if self._state.is_accepting() or not named:
            return bool(self._state.is_accepting())
        after = self._state.deep_copy()
        return bool(after.consume_token(stop) and after.is_accepting())


class _TokenizerAdapter:
    """What llguidance needs from a tokenizer: the bytes of each token, and how to tokenise a text.

    Its own adapter reads <tool_call> in a text as the token of that name, which text must not become, and then fails on
    it: such a text is tokenised greedily instead.
    """

    bos_token_id = None

    def __init__(self, base: Any, added: Sequence[str]) -> None:
        self._own = base
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self.eos_token_id: int = base.eos_token
        self.tokens = [base.decode_bytes([token]) for token in range(base.vocab_size)]
        self.special_token_ids = [token for token in range(base.vocab_size) if base.is_special_token(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # llguidance probes which of the two is accepted
            raise TypeError("expected str, not bytes")
        ids: list[int] = self._own.greedy_tokenize(text) if self._added.search(text) else self._own.tokenize_str(text)
        return ids


def _ll_tokenizer(library: Any, tokenizer: Any, size: int) -> Any:
    try:
        from llguidance.hf import from_tokenizer

        base = from_tokenizer(tokenizer, n_vocab=size)
        words = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        tokens = library.TokenizerWrapper(_TokenizerAdapter(base, [word for word in words if word]))
        return library.LLTokenizer(tokens, n_vocab=size, eos_token=base.eos_tokens)
    except Exception as fault:  # it can raise anything
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ModelError(
            f"llguidance cannot read the tokenizer of {name}, which a grammar needs: {_first_line(str(fault))} "
            "(use a fast byte-level tokenizer)"
        ) from fault


def _check_schema(grammar: Grammar) -> None:
    """Check the schema first: llguidance reports what is wrong with a schema, but not where."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as fault:
        raise GrammarError(f"{grammar.source} is not valid JSON: {fault}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError(
            f"{grammar.source}: a JSON schema must be an object, true or false, not {_first_line(str(schema))}"
        )
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as fault:
        raise GrammarError(f"{grammar.source}: at {fault.json_path}: {_first_line(fault.message)}") from None


def _grammar_error_message(grammar: Grammar, error: str) -> str:
    """llguidance's error in one line, with its location."""
    reason = _first_line(error)
    if grammar.language == "json_schema":
        keys = re.findall(r'"([^"]+)"', reason) if reason.startswith("Unimplemented keys") else []
        paths = [path for path, key in _schema_keys(json.loads(grammar.text), "$") if key in keys]
        return f"at {paths[0]}: {reason}" if paths else reason
    if grammar.language == "regex":
        # "    a(b", "     ^", "error: unclosed group": the pattern and the caret under it are indented by four
        match = re.search(r"^ {4}( *)\^+\s*\nerror: (.*)$", error, re.MULTILINE)
        return f"at character {len(match[1]) + 1} of {grammar.text!r}: {match[2]}" if match else reason
    position = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", reason)
    return f"line {position[1]}, column {position[2]}: {position[3]}" if position else reason


def _schema_keys(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    for key, value in schema.items() if isinstance(schema, dict) else ():
        yield f"{path}.{key}", key
        yield from _schema_keys(value, f"{path}.{key}")
    for index, value in enumerate(schema if isinstance(schema, list) else ()):
        yield from _schema_keys(value, f"{path}[{index}]")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
