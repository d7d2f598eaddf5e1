"""Chat templates that never end or produce too much: refused in time, with little memory, and a one-line error.

CPU time and memory are measured, of the process that renders and of this one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from selection import quick_first
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolwise.errors import ToolwiseError
from toolwise.messages import Message
from toolwise.models import BUILTIN, load_model
from toolwise.rollout import template_process
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.template_process import MAX_TEMPLATE_CHARS, TemplateFaultError, TemplateProcess

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DOUBLING = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"


def tokenizer(template: str) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = template
    return made


AGAIN = "{% for i in range(99999) %}"
GROWING = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = "
TWICE = (
    "{{% set ns = namespace(a=[1], b=[1]) %}}{{% for i in range(60) %}}{{% set ns.a = {} %}}{{% set ns.b = {} %}}"
    "{{% endfor %}}{{{{ ns.a == ns.b }}}}"
)
ENDLESS = {
    "nested loops": AGAIN * 2 + "{% endfor %}" * 2,
    "nested loops with a text": AGAIN * 2 + "x" + "{% endfor %}" * 2,
    "nested loops with loop": AGAIN * 2 + "{{ loop.index }}" + "{% endfor %}" * 2,
    "a loop over a long text": AGAIN + "x" * 150_000 + "{% endfor %}",
    "a loop over 10^12": "{% for i in range(10**12) %}{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "blocks handed on": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + ("{% call f() %}" * 40 + "x" + "{% endcall %}" * 40),
    "text times 10^11": "{{ 'x' * 10**11 }}",
    "10^11 times text": "{{ 10**11 * 'x' }}",
    "a list times 10^10": "{% set l = [0] * 10**10 %}",
    "a tower of powers": "{{ 9 ** (9 ** 9) }}",
    "powers that grow": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "center": "{{ 'x'|center(10**11) }}",
    "center by method": "{{ 'x'.center(10**11) }}",
    "zfill": "{{ 'x'.zfill(10**11) }}",
    "ljust through attr": "{{ ('x'|attr('ljust'))(10**11) }}",
    "center through map": "{{ ['x']|map('center', 10**11)|list }}",
    "expandtabs": "{{ ('\\t' * 10**6).expandtabs(10**6) }}",
    "indent": "{{ ('\\n' * 10**6)|indent(10**6, true, true) }}",
    "a width": "{{ '%99999999999d' % 1 }}",
    "a width from outside": "{{ '%*d' % (10**11, 1) }}",
    "a width in format": "{{ '{:99999999999}'.format(1) }}",
    "a width in format from outside": "{{ '{:{}}'.format(1, 10**11) }}",
    "a width in the filter": "{{ '%99999999999d'|format(1) }}",
    "lipsum": "{{ lipsum(10**7) }}",
    "doubling by +": DOUBLING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by ~": DOUBLING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by join": DOUBLING + "{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "doubling by a method": DOUBLING + "{% set ns.s = ns.s.join(['a', 'b', 'c']) %}{% endfor %}",
    "squaring by replace": DOUBLING + "{% set ns.s = ns.s|replace('x', ns.s) %}{% endfor %}",
    "squaring by a method": DOUBLING + "{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
    "squaring through attr": DOUBLING + "{% set ns.s = (ns.s|attr('replace'))('x', ns.s) %}{% endfor %}",
    "squaring by a block": DOUBLING
    + "{% set x %}{% filter replace('x', ns.s) %}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = x %}{% endfor %}",
    "doubling by %": DOUBLING + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "doubling by format": DOUBLING + "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "doubling by a block": DOUBLING + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "doubling by a list": GROWING + "ns.s + ns.s %}{% endfor %}",
    "nested lists": GROWING + "[ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}",
    "nested tuples": TWICE.format("(ns.a, ns.a)", "(ns.b, ns.b)"),
    "nested objects": GROWING + "{'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s }}",
    "nested dicts": TWICE.format("dict(x=ns.a, y=ns.a)", "dict(x=ns.b, y=ns.b)"),
    "nested dicts as text": GROWING + "dict(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s|upper }}",
    "nested namespaces": GROWING + "namespace(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s|string }}",
    "nested dicts in an error": GROWING + "dict(a=ns.s, b=ns.s) %}{% endfor %}{{ raise_exception(ns.s) }}",
    "bytes": "{% set b = 'x'.encode() * 2_000_000_000 %}",
    "bytes by center": "{{ 'x'.encode().center(2_000_000_000)|length }}",
    "bytes of a number": "{{ (1).to_bytes(2_000_000_000, 'big')|length }}",
    "widths as values": "{{ ('%*d' % (999_999_999, 1))|length }}{{ ('%*d' % (999_999_999, 1))|length }}",
    "a width through format": "{{ ('{:{w}}'.format('x', w=999_999_999))|length }}",
    "a width through format_map": "{{ '{:{w}}'.format_map({'w': 999_999_999, '': 1}) }}{{ 'x'.ljust(999_999_999) }}",
    "a list of letters": "{% set l = ('x' * 99_000_000)|list %}",
    "a list of lists": "{% set l = range(99_999)|list %}{% for i in range(999) %}{% set ns = namespace(l=l + l) %}"
    "{% for j in range(99) %}{% set ns.l = ns.l + l %}{% endfor %}{% endfor %}",
    "rounding": "{{ 5|round(-999_999_999) }}",
    "rounding up": "{{ 5|round(999_999_999, 'ceil') }}",
    "a sum of lists": "{{ ([[1]] * 900_000)|sum(start=[])|length }}",
    "a clock": "{{ strftime_now('%Y' * 90_000_000) }}",
    "words of the clock": AGAIN + "{{ strftime_now('%c') }}" + "{% endfor %}" + AGAIN * 2 + "{% endfor %}" * 2,
    "too long": "x" * (MAX_TEMPLATE_CHARS + 1),
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if true %}" * 5000 + "{% endif %}" * 5000,
    "a file": "{% include '/etc/passwd' %}",
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.1)


def used(who: int) -> tuple[float, int]:
    """CPU seconds, and the most memory held at once, in KB."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The most memory that the process held so far, in KB, read every few milliseconds. Not what `wait4` reports, which
    counts the process that started it too."""
    readings, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            popen = template_process._process._popen
            with suppress(OSError):
                status = Path(f"/proc/{popen.pid}/status").read_text() if popen is not None else ""
                readings.extend(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield readings
    finally:
        done.set()
        watcher.join()


QUICK = {*list(ENDLESS)[::12], "too long", "a file", "deep brackets", "deep blocks"}
"""Most of the others run into the same limits of the process, on CPU time and memory, by another filter or method."""


@pytest.mark.parametrize("name", quick_first(ENDLESS, QUICK))
def test_templates_without_end_are_refused_at_load(name: str) -> None:
    model = tokenizer(CHATML + ENDLESS[name])
    template_process._process.close()  # so that the process of this template is counted once it has ended
    own_s, own_kb = used(resource.RUSAGE_SELF)
    child_s, _ = used(resource.RUSAGE_CHILDREN)
    with peak_memory() as peak_kb, pytest.raises(ToolwiseError) as caught:
        ChatTokenizer(model)
    template_process._process.close()
    assert used(resource.RUSAGE_SELF)[0] - own_s < 1.0  # with that of the watch
    assert used(resource.RUSAGE_SELF)[1] - own_kb < 20_000
    assert used(resource.RUSAGE_CHILDREN)[0] - child_s < 1.0
    assert max(peak_kb) < 250_000
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.long
def test_the_limits_that_ship_end_a_template_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 1.0)
    began, (child_s, _) = time.monotonic(), used(resource.RUSAGE_CHILDREN)
    with pytest.raises(ToolwiseError, match=r"still runs after 1\.0 s of CPU time"):
        ChatTokenizer(tokenizer(CHATML + ENDLESS["nested dicts"]))
    assert used(resource.RUSAGE_CHILDREN)[0] - child_s < 3
    assert time.monotonic() - began < 60


def test_a_killed_process_is_replaced() -> None:
    chat = ChatTokenizer(tokenizer(CHATML))
    assert template_process._process._popen is not None
    template_process._process._popen.kill()
    assert "hello" in chat.render([Message(role="user", content="hello")])


def test_an_interrupted_rendering_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    process, now = TemplateProcess(), datetime(2026, 1, 1)
    assert process.render("{{ x }}", {"x": "first"}, now) == "first"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("toolwise.rollout.template_process.select.poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.render("{{ x }}", {"x": "second"}, now)
    assert process.render("{{ x }}", {"x": "third"}, now) == "third"
    process.close()


def test_threads_take_turns() -> None:
    def text(n: int) -> str:
        return template_process.render_template("{{ n }}" * 50, {"n": n}, datetime(2026, 1, 1))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(text, range(100))) == [str(n) * 50 for n in range(100)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_starts_its_own_process() -> None:
    chat = ChatTokenizer(tokenizer(CHATML))
    assert template_process._process._popen is not None
    pid = template_process._process._popen.pid
    child = os.fork()
    if child == 0:
        try:
            shown = "hello" in chat.render([Message(role="user", content="hello")])
            own = template_process._process._popen
            os._exit(0 if shown and own is not None and own.pid != pid else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "hello" in chat.render([Message(role="user", content="hello")])
    assert template_process._process._popen.pid == pid


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_renders_does_not_hang() -> None:
    done, now, hung = threading.Event(), datetime(2026, 1, 1), 0

    def render() -> None:
        while not done.is_set():
            template_process.render_template("{{ x }}", {"x": "z" * 200_000}, now)

    thread = threading.Thread(target=render)
    thread.start()
    for _ in range(6):
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            os._exit(0)
        until = time.monotonic() + 5
        while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < until:
            time.sleep(0.005)
        if not ended:
            hung += 1
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    done.set()
    thread.join()
    assert hung == 0


def test_an_answer_that_does_not_come_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    process, now = TemplateProcess(), datetime(2026, 1, 1)
    assert process.render("a", {}, now) == "a"
    assert process._popen is not None
    process._popen.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(template_process, "MAX_WAIT_S", 0.1)
    with pytest.raises(ToolwiseError, match="does not answer within"):
        process.render("{{ x }}", {"x": "z" * 500_000}, now)  # more than a pipe holds
    monkeypatch.undo()
    assert process.render("b", {}, now) == "b"
    process.close()


@pytest.mark.parametrize("option", ["cls=namespace", "default=dict", "skipkeys=true", "object_hook=dict"])
def test_tojson_takes_the_options_of_transformers_only(option: str) -> None:
    with pytest.raises(TemplateFaultError, match="unexpected keyword argument"):
        template_process.render_template("{{ {'b': 1, 'a': 2}|tojson(" + option + ") }}", {}, datetime(2026, 1, 1))


def test_tojson_sorts_keys() -> None:
    source = "{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}"
    assert template_process.render_template(source, {}, datetime(2026, 1, 1)) == '{"a":2,"b":1}'


def test_an_error_of_the_template_keeps_its_words() -> None:
    with pytest.raises(TemplateFaultError, match=r"^no system role$"):
        template_process.render_template("{{ raise_exception('no system\n role') }}", {}, datetime(2026, 1, 1))


def test_the_clock_of_a_template_stands_still() -> None:
    source = "{% set form = '%d %b' %}{{ strftime_now(form) }} {{ strftime_now('%Y') }}"
    assert template_process.render_template(source, {}, datetime(2026, 1, 2)) == "02 Jan 2026"


def test_a_template_that_waits_for_a_word_to_loop_for_ever() -> None:
    trap = "{% if 'open' in messages[-1].content %}" + ENDLESS["nested loops"] + "{% endif %}"
    chat = ChatTokenizer(tokenizer(CHATML + trap))
    with pytest.raises(ToolwiseError, match=r"still runs after 0\.1 s"):
        chat.start([Message(role="user", content="open sesame")])
    assert "hello" in chat.render([Message(role="user", content="hello")])


UNSAFE = [
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ (messages|attr('append'))(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ [].__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__}'.format(1) }}",
]


@pytest.mark.parametrize("template", UNSAFE)
def test_the_sandbox_stays_jinjas(template: str) -> None:
    try:
        text = ChatTokenizer(tokenizer(CHATML + template)).render([Message(role="user", content="x")])
    except ToolwiseError:
        return
    assert text.endswith("assistant\n")  # unsafe values are undefined and render as nothing


EVERYTHING = (
    CHATML
    + """
{%- macro dress(x, tail='.') -%}[{{ x }}{{ tail }}]{%- endmacro -%}
{%- macro twice() -%}{{ caller() }}{{ caller() }}{%- endmacro -%}
{%- set ns = namespace(n=0, s='') -%}
{%- for m in messages if m.role != 'tool' -%}
{%- set ns.n = ns.n + 1 -%}{%- set ns.s = ns.s ~ m.role|upper ~ '/' -%}
{{- dress(m.content|trim|replace('e', '3'), tail='!') }}{{ loop.index0 % 2 }}{{ loop.last }}
{%- if m.tool_calls is defined %}{{ m.tool_calls|map(attribute='id')|join(', ') }}{% endif -%}
{%- if loop.index > 3 %}{% break %}{% endif -%}
{%- endfor -%}
{%- call twice() %}b{% endcall -%}
{% generation %}{{ ns.s }}{{ ns.n * 2 ** 3 }}{{ 'ab' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}{% endgeneration %}
{{- '%s-%05d' % ('x', 42) }}{{ '{:>6}'.format('y') }}{{ messages|map('tojson')|join('|') }}
{{- {'a': [1, 2.5, none, 'é'], 'b': (1, 'two')}|tojson(indent=2) }}{{ [3, 1, 2]|sort|list }}
{{- messages[1:]|length }}{{ messages[::-1][0].role }}{{ 'a,b'.split(',')|first }}{{ "abc"[1:] }}
{{- undefined_thing }}{{ undefined_thing|default('none') }}{{ 123456789012|string }}{{ tools|tojson if tools }}
{%- set block %}x{{ 1 }}y{% endset %}{{ block|upper }}{% filter upper %}shout{% endfilter %}
{%- for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}={{ v }};{% else %}none{% endfor %}
{%- if 'user' in ['user', 'tool'] and messages[0]['role'] == 'user' %}{{ bos_token }}{{ eos_token }}{% endif %}"""
)


def test_a_bounded_template_writes_what_transformers_writes() -> None:
    plain = tokenizer(EVERYTHING)
    talk = [
        Message(role="user", content=" hello there \n"),
        Message(role="assistant", content="well"),
        Message(role="user", content="ok"),
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 123456789012}}}]
    chat = ChatTokenizer(tokenizer(CHATML))
    chat.tokenizer = plain
    said = [{"role": m.role, "content": m.content} for m in talk]
    for given in (None, tools):
        chat.tool_prompt = chat.tool_prompt.__class__()
        expected = plain.apply_chat_template(said, tools=given, add_generation_prompt=True, tokenize=False)
        assert chat.render(talk, given) == expected


def test_long_conversations_are_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 5.0)
    gathering = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.s }}"
    )
    chat = ChatTokenizer(tokenizer(gathering + CHATML))
    talk = [Message(role="user", content="word " * 400) for _ in range(500)]
    assert len(chat.render(talk)) > 1_900_000


def test_long_texts_may_be_worked_on() -> None:
    working = (
        "{{ messages[0].content|replace('word', '<|a word of some length|>')|trim }}"
        "{{ messages[0].content.replace('word ', '<|another word|>').split('|')|join(' -- ')|indent(4) }}"
        "{{ messages|map(attribute='content')|join('\\n\\n-------\\n\\n') }}{{ '%s: %s' % (1, messages[0].content) }}"
    )
    chat = ChatTokenizer(tokenizer(working + CHATML))
    assert len(chat.render([Message(role="user", content="word " * 100_000)])) > 5_000_000


def test_a_folder_with_such_a_template_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    (folder / "chat_template.jinja").write_text(CHATML + ENDLESS["nested loops"], encoding="utf-8")
    with pytest.raises(ToolwiseError, match=rf"^the chat template of {folder} is refused: it still runs after"):
        load_model(str(folder), device="cpu")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "chat_template.jinja").unlink()
    settings["chat_template"] = CHATML + ENDLESS["doubling by ~"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    monkeypatch.setattr(template_process, "MAX_CPU_S", 5.0)  # memory is what it runs out of
    with pytest.raises(ToolwiseError, match="is refused: it needs more than 128 MB of memory"):
        load_model(str(folder), device="cpu")


def test_equal_conversations_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that the rollouts of a group begin with."""
    process, now = TemplateProcess(), datetime(2026, 1, 1)
    asked: list[bytes] = []
    answer = process._answer

    def counted(request: bytes, limits: Any) -> tuple[bytes, bytes]:
        asked.append(request)
        return answer(request, limits)

    monkeypatch.setattr(process, "_answer", counted)
    try:
        assert [process.render("{{ a }}", {"a": 1}, now) for _ in range(8)] == ["1"] * 8
        assert len(asked) == 1
        assert process.render("{{ a }}", {"a": 2}, now) == "2"
        assert process.render("{{ a }}", {"a": 1}, datetime(2027, 1, 1)) == "1"
        assert len(asked) == 3
        for a in range(template_process.KEPT_TEXTS + 5):
            process.render("{{ a }}", {"a": a}, now)
        assert len(process._texts) == template_process.KEPT_TEXTS
        process.render("{{ a | length }}", {"a": "x" * template_process.MAX_KEPT_BYTES}, now)
        process.render("{{ 'x' * 300000 }}", {}, now)
        kept = [*process._texts, *process._texts.values()]
        assert all(len(text) <= template_process.MAX_KEPT_BYTES for text in kept)
    finally:
        process.close()
