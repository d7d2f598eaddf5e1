"""Replies constrained by a grammar: real llguidance, the built-in model, and requests that must not be affected."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import jsonschema
import pytest
import torch
from engine_cases import assert_forced, counted, run, shipped
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import quick_first

from toolwise.config.rollout import GrammarConfig
from toolwise.config.schema import load_config
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.engine.cuda_graphs import MultiStepDecoder
from toolwise.engine.grammar import Constraint, Grammar, GrammarError, Vocabulary, grammar_from_config
from toolwise.engine.request import Request
from toolwise.engine.sampler import draw
from toolwise.errors import ConfigError, MissingExtraError, ModelError, PolicyError
from toolwise.messages import Message
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Generation, Sampling
from toolwise.training.rollout_setup import local_policy

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "café", "日本茶", "🍵"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@cache
def vocabulary() -> Vocabulary:
    model, chat = shipped()
    return Vocabulary(chat.tokenizer, model.config.vocab_size)


def constraint(grammar: Grammar) -> Constraint:
    return vocabulary().compile(grammar)


def prompt(text: str = "Who is there?") -> list[int]:
    ids: list[int] = shipped()[1].start([Message(role="user", content=text)])
    return ids


def sampling(**more: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 200, "stop_token_ids": (shipped()[1].end_id,), **more})


def reply(found: Generation) -> str:
    text: str = shipped()[1].decode(found.token_ids)
    return text


def generate(grammars: Sequence[Grammar | None], samplings: Sequence[Sampling], **settings: Any) -> list[Generation]:
    """All at once, in one engine whose blocks are checked."""
    engine = counted(shipped()[0], **settings)

    async def ask() -> list[Generation]:
        return await asyncio.gather(
            *(
                engine.generate(prompt(), s, logits_mask=None if g is None else constraint(g).mask(s))
                for g, s in zip(grammars, samplings, strict=True)
            )
        )

    return run(ask())


def test_replies_under_a_schema_are_valid_json_over_many_seeds() -> None:
    draws = [sampling(seed=seed, temperature=1.5) for seed in range(40)]
    found = generate([Grammar.json_schema(PERSON)] * len(draws), draws, blocks=2048)
    for one in found:
        assert one.finish_reason == "stop"
        jsonschema.validate(json.loads(reply(one)), PERSON)
    assert len({reply(one) for one in found}) > 30


def test_the_likeliest_reply_under_a_schema_is_valid_too() -> None:
    [found] = generate([Grammar.json_schema(PERSON)], [sampling(do_sample=False)])
    jsonschema.validate(json.loads(reply(found)), PERSON)


@pytest.mark.parametrize("pattern", [r"[a-c]{3,7}-\d{2}", r"(yes|no|maybe)( indeed)?", r"é+日本{2}(🍵|☕){1,3}", r"a?"])
def test_a_regex_is_matched_by_the_whole_reply(pattern: str) -> None:
    found = generate([Grammar.regex(pattern)] * 20, [sampling(seed=seed) for seed in range(20)])
    assert all(re.fullmatch(pattern, reply(one)) for one in found)
    assert all(one.finish_reason == "stop" for one in found)


@pytest.mark.parametrize(
    "text", ["yes", "", 'a "quoted" line\nand another', "naïve 日本語 🍵", "<tool_call>no call</tool_call><|end|>"]
)
def test_a_grammar_of_one_string_gives_that_string(text: str) -> None:
    grammar = Grammar.lark(f"start: {json.dumps(text, ensure_ascii=False)}")
    for found in generate([grammar] * 2, [sampling(), sampling(do_sample=False)]):
        assert reply(found) == text
        assert found.token_ids[-1] == shipped()[1].end_id
        assert found.finish_reason == "stop"


def test_lark_names_the_tokens_of_the_tokenizer() -> None:
    call = Grammar.lark('start: <tool_call> "{" /[a-z]{1,5}/ "}" </tool_call>')
    tokenizer = shipped()[1].tokenizer
    for found in generate([call] * 5, [sampling(seed=seed) for seed in range(5)]):
        first, last = tokenizer.convert_ids_to_tokens([found.token_ids[0], found.token_ids[-2]])
        assert (first, last) == ("<tool_call>", "</tool_call>")
        assert re.fullmatch(r"<tool_call>\{[a-z]{1,5}\}</tool_call>", reply(found))


@pytest.mark.parametrize("deterministic", quick_first([True, False], [False]))
def test_different_grammars_and_none_in_one_batch_and_the_free_one_is_as_alone(deterministic: bool) -> None:
    free = sampling(seed=3, max_new_tokens=24)
    words, person = Grammar.regex(r"(red|green|blue){4}"), Grammar.json_schema(PERSON)
    grammars = [words, None, person, None, words]
    samplings = [sampling(seed=1), free, sampling(seed=2), replace(free, do_sample=False), sampling(seed=5)]
    found = generate(grammars, samplings, deterministic=deterministic)
    assert re.fullmatch(r"(red|green|blue){4}", reply(found[0]))
    assert re.fullmatch(r"(red|green|blue){4}", reply(found[4]))
    jsonschema.validate(json.loads(reply(found[2])), PERSON)
    for place in (1, 3):
        [alone] = generate([None], [samplings[place]], deterministic=deterministic)
        assert found[place].token_ids == alone.token_ids
        assert list(found[place].logprobs) == pytest.approx(list(alone.logprobs), abs=0 if deterministic else 1e-4)
    for place in (0, 2, 4):
        [alone] = generate([grammars[place]], [samplings[place]], deterministic=deterministic)
        assert found[place].token_ids == alone.token_ids


def test_the_rows_of_companions_are_drawn_to_the_bit_as_without_a_mask() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * 4
    draws = [Sampling(seed=seed) for seed in range(6)]
    allowed = torch.ones(6, 500, dtype=torch.bool)
    allowed[2] = False
    allowed[2, 7] = True
    plain, masked = draw(logits, draws, range(6)), draw(logits, draws, range(6), allowed)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(plain[0][others], masked[0][others])
    assert torch.equal(plain[1][others], masked[1][others])
    assert masked[0][2] == 7


def test_what_is_left_may_be_as_unlikely_as_it_likes() -> None:
    logits = torch.zeros(50, 9)
    logits[:, 0] = 500.0
    allowed = torch.zeros(50, 9, dtype=torch.bool)
    allowed[:, 3:5] = True
    tokens, logprobs = draw(logits, [Sampling(seed=seed) for seed in range(50)], [0] * 50, allowed)
    assert set(tokens.tolist()) == {3, 4}
    assert torch.allclose(logprobs, torch.tensor(-500.0))


def test_logprobs_stay_the_models_own() -> None:
    [found] = generate([Grammar.json_schema(PERSON)], [sampling(seed=4, temperature=0.7)])
    assert_forced(shipped()[0], prompt(), found, temperature=0.7)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.integers(0, 2**32))
def test_any_walk_through_a_grammar_of_one_value_spells_that_value(value: Any, seed: int) -> None:
    chat = shipped()[1]
    mask = constraint(Grammar.json_schema({"const": value})).mask(sampling())
    chance = random.Random(seed)
    ids: list[int] = []
    while (token := chance.choice(mask(ids).nonzero().flatten().tolist())) != chat.end_id:
        ids.append(token)
        assert len(ids) < 2000
    assert json.loads(chat.decode(ids)) == value


def test_a_reply_that_is_cut_short_says_so_and_has_followed_the_grammar_so_far() -> None:
    [found] = generate([Grammar.regex("x{300}")], [sampling(max_new_tokens=7)])
    assert found.finish_reason == "length"
    assert len(found.token_ids) == 7
    assert set(reply(found)) == {"x"}


def test_preemption_and_chunks_leave_the_place_in_the_grammar() -> None:
    draws = [sampling(seed=seed, max_new_tokens=60) for seed in range(6)]
    grammar = Grammar.regex(r"[a-z]{25}")
    roomy = generate([grammar] * 6, draws)
    tight = generate([grammar] * 6, draws, blocks=20, max_batch_tokens=16)
    assert all(re.fullmatch(r"[a-z]{25}", reply(one)) for one in tight)
    assert [one.token_ids for one in tight] == [one.token_ids for one in roomy]


class Counting:
    """llguidance's state, recording how many tokens it gets at a time."""

    def __init__(self, state: Any) -> None:
        self.state, self.given = state, []

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.given.append(len(tokens))
        return bool(self.state.consume_tokens(tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


def test_a_grammar_that_two_threads_ask_for_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, compiled = copy(vocabulary()), list[str]()
    fresh._compiled, together = {}, Barrier(2)

    def compile_slowly(grammar: Grammar) -> Any:
        compiled.append(grammar.text)
        time.sleep(0.05)
        return None

    def ask() -> Constraint:
        together.wait(10)
        return fresh.compile(Grammar.regex("a"))

    monkeypatch.setattr(Vocabulary, "_matcher", lambda self, grammar: compile_slowly(grammar))
    with ThreadPoolExecutor(2) as threads:
        first, second = (asked.result() for asked in [threads.submit(ask), threads.submit(ask)])
    assert first is second
    assert compiled == ["a"]


def test_each_token_is_read_once() -> None:
    mask = constraint(Grammar.regex("[ab]{30}")).mask(sampling())
    mask._state = state = Counting(mask._state)
    letter = shipped()[1].tokenizer.convert_tokens_to_ids("a")
    for length in range(20):
        assert mask([letter] * length)[letter]
    assert state.given == [0] + [1] * 19


def test_a_mask_is_one_requests() -> None:
    mask = constraint(Grammar.regex("[ab]{30}")).mask(sampling())
    letter = shipped()[1].tokenizer.convert_tokens_to_ids("a")
    mask([letter, letter])
    with pytest.raises(GrammarError, match="belongs to one request"):
        mask([])


def test_the_end_is_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    tokenizer, end = shipped()[1].tokenizer, shipped()[1].end_id
    mask = constraint(Grammar.regex("(ab)*")).mask(sampling())
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert [bool(mask([a, b, a][:length])[end]) for length in range(4)] == [True, False, True, False]


def test_any_stop_token_of_the_request_ends_and_no_other() -> None:
    chat = shipped()[1]
    other = chat.tokenizer.convert_tokens_to_ids("</response>")
    [found] = generate([Grammar.regex("yes")], [sampling(stop_token_ids=(other,))])
    assert found.token_ids[-1] == other
    assert found.finish_reason == "stop"
    assert not constraint(Grammar.regex("y?")).mask(sampling(stop_token_ids=(other,)))([])[chat.end_id]


def test_a_stop_token_that_is_text_does_not_end_in_the_middle() -> None:
    tokenizer = shipped()[1].tokenizer
    comma = tokenizer.convert_tokens_to_ids(",")
    mask = constraint(Grammar.regex("a,b,")).mask(sampling(stop_token_ids=(comma,)))
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    with_end = constraint(Grammar.lark('start: "a" <|end|>')).mask(sampling())
    assert not mask([a])[comma], "the reply would end in the middle"
    assert with_end([a])[shipped()[1].end_id], "the grammar names the end itself"
    assert b != comma


def test_without_a_stop_token_there_is_no_end_and_that_is_said() -> None:
    with pytest.raises(GrammarError, match="stop_token_ids are \\[\\]"):
        constraint(Grammar.regex("a")).mask(Sampling())


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone() -> None:
    engine = counted(shipped()[0])
    broken = constraint(Grammar.regex("[a-z]{30}")).mask(sampling())

    class Wrong:
        def __call__(self, sampled: Sequence[int]) -> Any:
            return broken([*sampled[:-1], shipped()[1].end_id]) if len(sampled) > 2 else broken(sampled)

    async def ask() -> list[Any]:
        good = constraint(Grammar.regex("[a-z]{30}")).mask(sampling(seed=1))
        return await asyncio.gather(
            engine.generate(prompt(), sampling(seed=1), logits_mask=Wrong()),
            engine.generate(prompt(), sampling(seed=1), logits_mask=good),
            engine.generate(prompt(), sampling(seed=1, max_new_tokens=5)),
            return_exceptions=True,
        )

    bad, good, free = run(ask())
    assert isinstance(bad, PolicyError)
    assert "does not allow a sampled token" in str(bad)
    assert "\n" not in str(bad)
    assert re.fullmatch("[a-z]{30}", reply(good))
    assert len(free.token_ids) <= 5


def test_decoding_ahead_does_not_take_a_request_with_a_mask() -> None:
    loop = asyncio.new_event_loop()
    request = Request("generate", [5], 1, sampling(), loop.create_future(), loop)
    assert MultiStepDecoder.supports(request)
    request.logits_mask = constraint(Grammar.regex("a")).mask(sampling())
    assert not MultiStepDecoder.supports(request)
    loop.close()


@pytest.mark.parametrize("fused", [True, None])
def test_many_steps_at_a_time_keep_to_a_grammar_on_a_cpu_and_a_gpu_goes_step_by_step(fused: bool | None) -> None:
    engine = counted(shipped()[0], fused=fused)
    if not hasattr(engine.runner, "decode_multi_step"):
        pytest.skip("goes step by step anyway")
    ahead, taken = engine.runner.decode_multi_step, []
    engine.runner.decode_multi_step = lambda requests, *how: taken.extend(requests) or ahead(requests, *how)
    pattern = r"[a-z]{12}|(ab|cd){5}"

    async def ask(*grammars: Grammar | None) -> list[Generation]:
        draws = [sampling(seed=seed, max_new_tokens=40) for seed in range(len(grammars))]
        masks = [None if g is None else constraint(g).mask(s) for g, s in zip(grammars, draws, strict=True)]
        pairs = zip(draws, masks, strict=True)
        return await asyncio.gather(*(engine.generate(prompt(), s, logits_mask=mask) for s, mask in pairs))

    for found in run(ask(Grammar.regex(pattern), Grammar.regex(pattern))):
        assert re.fullmatch(pattern, reply(found))
    assert bool(taken) == isinstance(engine.runner, CpuRunner)
    held, _ = run(ask(Grammar.regex(pattern), None))
    assert re.fullmatch(pattern, reply(held))
    run(ask(None))
    assert taken
    assert isinstance(engine.runner, CpuRunner) or all(request.logits_mask is None for request in taken)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (
            Grammar.json_schema({"properties": {"a": {"items": {"type": "nothing"}}}}),
            r"\$\.properties\.a\.items\.type: ",
        ),
        (
            Grammar.json_schema({"properties": {"a": {"uniqueItems": True, "type": "array"}}}),
            r"\$\.properties\.a\.uniq",
        ),
        (Grammar.json_schema({"$ref": "#/$defs/x"}), r"Pointer '/\$defs/x' does not exist"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (Grammar("json_schema", "[1]"), "an object, true or false, not"),
        (Grammar("json_schema", '{"a":\n 1,}'), "is not valid JSON: .*line 2 column 4"),
        (Grammar.regex("ab(c"), r"at character 3 of 'ab\(c': unclosed group"),
        (Grammar.regex("(?=a)b"), "at character 1 .*look-around"),
        (Grammar.lark('start: "a"\n  | foo'), r"line \d, column \d+: unknown name"),
        (Grammar.lark("start: <|nope|>"), "line 1, column 8: unknown special token"),
        (Grammar.lark('other: "a"'), "no start rule"),
        (Grammar.lark('start: start "a"'), "no reply can match it"),
        (Grammar.lark(""), "Empty grammar"),
    ],
)
def test_a_bad_grammar_is_one_line_that_says_where(grammar: Grammar, said: str) -> None:
    with pytest.raises(GrammarError, match=said) as told:
        constraint(replace(grammar, source="my.file"))
    assert str(told.value).startswith("my.file")
    assert "\n" not in str(told.value)


def test_tables_and_grammars_are_made_once() -> None:
    one = constraint(Grammar.regex("once"))
    assert constraint(Grammar.regex("once")) is one
    assert constraint(Grammar.regex("twice")) is not one


def test_a_model_may_have_more_tokens_than_its_tokenizer() -> None:
    wide = Vocabulary(shipped()[1].tokenizer, 2100).compile(Grammar.regex("(?s:.*)"))
    mask = wide.mask(sampling())([])
    assert len(mask) == 2100
    assert not mask[2048:].any()


def test_a_tokenizer_that_cannot_be_read_is_said_so() -> None:
    class Slow:
        name_or_path = "slow-one"

        def __len__(self) -> int:
            return 10

    with pytest.raises(ModelError, match=r"cannot read the tokenizer of slow-one.*fast"):
        Vocabulary(Slow())


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"^llguidance is not installed: pip install 'toolwise\[grammar\]'$"):
        LocalPolicy(*shipped(), sampling(), grammar=Grammar.regex("a"))


# --- in a run


def write(folder: Path, rollout: str, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    (folder / "run.toml").write_text(f"[model]\ndevice = 'cpu'\n[rollout]\n{rollout}\n", encoding="utf-8")
    return folder / "run.toml"


def test_every_turn_of_a_session_follows_the_configured_grammar(tmp_path: Path) -> None:
    file = write(tmp_path, 'grammar = {json_schema = "person.json"}', person__json=json.dumps(PERSON))
    policy = local_policy(load_config(file), "builtin:small")
    session = policy.session(seed=3, do_sample=True)
    said = [Message(role="user", content="Who?")]
    for _ in range(2):
        action, text, logprobs, _ = run(session.get_action(said))
        assert text is not None
        assert logprobs is not None
        jsonschema.validate(json.loads(text), PERSON)
        assert logprobs["finish_reason"] == "stop"
        said += [Message(role="assistant", content=action["content"]), Message(role="user", content="And who else?")]


def test_lark_and_regex_come_from_the_configuration_too(tmp_path: Path) -> None:
    file = write(tmp_path, 'grammar = {lark = "colour.lark"}', colour__lark='start: "red" | "blue"')
    found = grammar_from_config(load_config(file).rollout.grammar)
    assert found == Grammar("lark", 'start: "red" | "blue"', str(tmp_path / "colour.lark"))
    assert grammar_from_config(GrammarConfig(regex="a+")) == Grammar.regex("a+", "rollout.grammar.regex")
    assert grammar_from_config(GrammarConfig()) is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"rollout\.grammar\.json_schema: .*nowhere\.json cannot be read \(No such"):
        grammar_from_config(GrammarConfig(json_schema=tmp_path / "nowhere.json"))


def test_one_grammar_at_a_time_and_no_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set only one of json_schema"):
        load_config(write(tmp_path, 'grammar = {regex = "a", lark = "b.lark"}'))
    with pytest.raises(ConfigError, match=r"unknown key `rollout\.grammar\.regexp` \(did you mean"):
        load_config(write(tmp_path, 'grammar = {regexp = "a"}'))


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_other_engines_refuse_a_grammar_before_they_start(tmp_path: Path, engine: str) -> None:
    with pytest.raises(ConfigError, match=f'`rollout`: grammar needs engine = "toolwise", got "{engine}"'):
        load_config(write(tmp_path, f'engine = "{engine}"\ngrammar = {{regex = "a"}}'))


def test_a_generator_of_ones_own_refuses_it_too() -> None:
    class Own:
        version = 0

        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
            return Generation(array("i"), array("f"), "stop", 0)

        def weights_changed(self, version: int) -> None: ...

    with pytest.raises(PolicyError, match="needs the Toolwise engine, but this policy uses Own"):
        LocalPolicy(*shipped(), sampling(), engine=Own(), grammar=Grammar.regex("a"))


def test_a_refused_grammar_is_refused_again_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, bad = vocabulary(), Grammar.json_schema({"type": "nothing at all"})
    with pytest.raises(GrammarError) as first:
        tables.compile(bad)
    monkeypatch.setattr(tables, "_matcher", lambda grammar: pytest.fail("compiled again"))
    with pytest.raises(GrammarError) as again:
        tables.compile(bad)
    assert str(again.value) == str(first.value)
