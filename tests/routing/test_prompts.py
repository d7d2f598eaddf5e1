"""Route-conditioned prompts: golden texts, and what holds for all 480 RLLA rows and for chat prompts.

The golden files are what `condition` gives for one row; look at each change of theirs before you keep it:
`TOOLWISE_WRITE_GOLDEN=1 python -m pytest tests/routing/test_prompts.py` writes them anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest

from toolwise.data.rlla_rows import TOOL_ENTRY, parse_tools
from toolwise.envs.tool_env import ToolEnv, tool_spec
from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.routing.families import ROUTES, Family, RouteAction, families_of_task
from toolwise.routing.prompts import (
    EMPTY_WORDING,
    ConditionedPrompt,
    allowed_tools,
    condition,
    load_wording,
    prompt_style,
    sort_tools,
    unconditioned,
)
from toolwise.tools.catalog import build_tools
from toolwise.types import Task

ANSWER, SEARCH, CALCULATE = ROUTES
PARTS = {"rlla": ("block", "note", "append"), "chat": ("note", "append")}
GOLDEN = Path(__file__).parents[1] / "fixtures" / "routed"
VARIANTS: dict[str, dict[str, Any]] = {"hard": {}, "soft": {"hard": False}, "append": {"mode": "append"}}
FAMILIES = {"calculator": Family.CALCULATE, "search": Family.SEARCH, "mail": Family.OTHER}
CHAT = [Message(role="user", content="How many bridges does Alder have?")]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_route = pytest.mark.parametrize("route", ROUTES)


def block_of(text: str) -> str:
    """From the heading to the end of the last entry; empty if there is none."""
    entries = list(TOOL_ENTRY.finditer(text))
    return text[text.index("**Available Tools**") : entries[-1].end()] if entries else ""


def names_in(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.name for entry in parse_tools(text)))


# Golden texts


@pytest.mark.parametrize(("route", "variant"), list(product(ROUTES, VARIANTS)))
def test_a_row_reads_as_the_golden_file_has_it(route: RouteAction, variant: str, rlla_tasks: list[Task]) -> None:
    task = rlla_tasks[MIXED_ROW]
    made = condition(task.prompt, route, families_of_task(task), **VARIANTS[variant])
    text = "\n".join(f"<<{m.role}>>\n{m.content}" for m in made.messages)
    text += f"\n<<tools>> {made.tools}\n<<forbidden>> {made.forbidden}\n"
    path = GOLDEN / f"{route.lower()}-{variant}.txt"
    if os.environ.get("TOOLWISE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


MIXED_ROW = 276
"""A row with tools of all three families."""


def test_the_golden_row_has_tools_of_every_family(rlla_tasks: list[Task]) -> None:
    assert set(families_of_task(rlla_tasks[MIXED_ROW]).values()) == set(Family)


def test_all_480_rows_read_as_they_did(rlla_tasks: list[Task]) -> None:
    """One digest per route and variant over all rows, so that any change is noticed."""
    lines = []
    for route, (name, settings) in product(ROUTES, VARIANTS.items()):
        digest = hashlib.sha256()
        for task in rlla_tasks:
            for message in condition(task.prompt, route, families_of_task(task), **settings).messages:
                digest.update(f"{message.role}\0{message.content}\0".encode())
        lines.append(f"{digest.hexdigest()}  {route} {name}\n")
    path = GOLDEN / "480-rows.sha256"
    if os.environ.get("TOOLWISE_WRITE_GOLDEN"):
        path.write_text("".join(lines), encoding="utf-8")
    assert "".join(lines) == path.read_text(encoding="utf-8")


# All 480 rows


@every_variant
@every_route
def test_conditioning_is_idempotent_and_reversible(route: RouteAction, variant: str, rlla_tasks: list[Task]) -> None:
    settings = VARIANTS[variant]
    for task in rlla_tasks:
        families, before = families_of_task(task), [m.model_dump() for m in task.prompt]
        made = condition(task.prompt, route, families, **settings)
        assert unconditioned(made.messages) == task.prompt
        assert condition(made.messages, route, families, **settings) == made
        assert [m.model_dump() for m in task.prompt] == before
        # Conditioning a conditioned prompt is the same as conditioning the original.
        other = ROUTES[(route.index + 1) % 3]
        assert condition(made.messages, other, families) == condition(task.prompt, other, families)


def test_answer_removes_the_tools_and_says_so(rlla_tasks: list[Task]) -> None:
    for task in rlla_tasks:
        made = condition(task.prompt, ANSWER, families_of_task(task))
        system, user = (m.content or "" for m in made.messages)
        assert parse_tools(system) == []
        assert "Available Tools" not in system
        assert "Do NOT use any tools" in system.rsplit("**Route**", 1)[1]
        assert user == task.prompt[1].content
        assert made.tools == ()
        assert "\n\n\n" not in system


@pytest.mark.parametrize("route", [SEARCH, CALCULATE])
def test_hard_routes_list_their_family_first_keep_others_and_drop_the_rest(
    route: RouteAction, rlla_tasks: list[Task]
) -> None:
    mine = Family.SEARCH if route is SEARCH else Family.CALCULATE
    for task in rlla_tasks:
        families = families_of_task(task)
        wanted = [n for n, f in families.items() if f is mine] + [n for n, f in families.items() if f is Family.OTHER]
        made = condition(task.prompt, route, families)
        system = made.messages[0].content or ""
        described = parse_tools(system)
        assert list(names_in(system)) == wanted
        assert made.tools == tuple(wanted)
        originals = parse_tools(task.prompt[0].content or "")  # some describe a tool twice
        kept = [entry for entry in originals if entry.name in wanted]
        assert sorted(described, key=kept.index) == kept
        numbers = [line.split(".")[0] for line in system.splitlines() if ". Name: " in line]
        assert numbers == [str(i) for i in range(1, len(kept) + 1)]
        assert ("There are no tools for this request." in system) == (not wanted)


@pytest.mark.parametrize("route", [SEARCH, CALCULATE])
def test_soft_routes_keep_every_tool_and_discourage_the_other_family(
    route: RouteAction, rlla_tasks: list[Task]
) -> None:
    for task in rlla_tasks:
        families = families_of_task(task)
        tools = sort_tools(route, families)
        made = condition(task.prompt, route, families, hard=False)
        system = made.messages[0].content or ""
        assert names_in(system) == (*tools.first, *tools.others, *tools.rest)
        assert ("Avoid the following" in system) == bool(tools.rest)
        if tools.rest:
            discouraged = system.split("Avoid the following", 1)[1]
            assert names_in(discouraged) == tools.rest
        assert made.tools == tools.offered(hard=False)


@every_route
@pytest.mark.parametrize("hard", [True, False])
def test_everything_outside_the_block_is_unchanged(route: RouteAction, hard: bool, rlla_tasks: list[Task]) -> None:
    for task in rlla_tasks:
        made = condition(task.prompt, route, families_of_task(task), hard=hard)
        system, original = made.messages[0].content or "", task.prompt[0].content or ""
        head, tail = original.split(block_of(original))
        assert system.startswith(head.rstrip())
        assert tail.strip() in system
        assert made.messages[1] is task.prompt[1]


@every_route
@pytest.mark.parametrize("hard", [True, False])
def test_appending_keeps_the_prompt_as_a_prefix(route: RouteAction, hard: bool, rlla_tasks: list[Task]) -> None:
    for task in rlla_tasks:
        made = condition(task.prompt, route, families_of_task(task), mode="append", hard=hard)
        assert made.messages[0] is task.prompt[0]
        said = made.messages[1].content or ""
        assert said.startswith(task.prompt[1].content or "")
        assert len(said) > len(task.prompt[1].content or "")
        assert made.tools is None


# Blocks that are not quite RLLA's


def rlla(entries: str, *, heading: str = "**Available Tools**\nYou can use:\n") -> list[Message]:
    return [Message(role="system", content=f"Be kind.\n\n{heading}{entries}\n\nBe brief."), *CHAT]


TWO = "1. Name: f\nDescription: Searches\nParameters: {}\n2. Name: g\nDescription: Computes\nParameters: {}"
TWO_FAMILIES = {"f": Family.SEARCH, "g": Family.CALCULATE}


def test_a_block_without_a_heading_gets_one_with_its_tools() -> None:
    made = condition(rlla(TWO, heading=""), SEARCH, TWO_FAMILIES).messages[0].content or ""
    assert made.startswith("Be kind.\n\n**Available Tools**\n")
    assert [entry.name for entry in parse_tools(made)] == ["f"]
    gone = condition(rlla(TWO, heading=""), ANSWER, TWO_FAMILIES).messages[0].content or ""
    assert gone.startswith("Be kind.\n\nBe brief.\n\n**Route**")


def test_a_tool_without_a_family_is_classified_by_its_name() -> None:
    made = condition(rlla(TWO), SEARCH, {}).messages[0].content or ""
    assert [entry.name for entry in parse_tools(made)] == ["f", "g"]


def test_a_tool_that_is_described_twice_stays_twice() -> None:
    made = condition(rlla(f"{TWO}\n3. Name: f\nDescription: More\nParameters: {{}}"), SEARCH, TWO_FAMILIES)
    assert [e.description for e in parse_tools(made.messages[0].content or "")] == ["Searches", "More"]


def test_entries_in_user_messages_are_left_alone() -> None:
    messages = [Message(role="user", content=TWO)]
    assert prompt_style(messages) == "chat"
    assert condition(messages, ANSWER, FAMILIES, templates=EMPTY_WORDING).messages is messages


def test_without_text_the_block_still_follows_the_route() -> None:
    made = condition(rlla(TWO), CALCULATE, TWO_FAMILIES, templates=EMPTY_WORDING).messages[0].content
    assert made == (
        "Be kind.\n\n**Available Tools**\nYou can use:\n1. Name: g\nDescription: Computes\nParameters: {}\n\nBe brief."
    )
    assert (
        condition(rlla(TWO), ANSWER, TWO_FAMILIES, templates=EMPTY_WORDING).messages[0].content
        == "Be kind.\n\nBe brief."
    )


# Chat prompts, whose tools the template writes


@pytest.mark.parametrize(
    ("route", "hard", "tools"),
    [
        (ANSWER, True, ()),
        (ANSWER, False, ()),
        (SEARCH, True, ("search", "mail")),
        (SEARCH, False, ("search", "mail", "calculator")),
        (CALCULATE, True, ("calculator", "mail")),
        (CALCULATE, False, ("calculator", "mail", "search")),
    ],
)
def test_a_route_passes_on_only_its_tools(route: RouteAction, hard: bool, tools: tuple[str, ...]) -> None:
    assert condition(CHAT, route, FAMILIES, hard=hard).tools == tools
    assert allowed_tools(route, FAMILIES, hard=hard) == tools


@every_route
def test_hiding_schemas_needs_no_text(route: RouteAction) -> None:
    for mode in _MODES:
        made = condition(CHAT, route, FAMILIES, mode=mode, templates=EMPTY_WORDING)
        assert made.messages is CHAT
    assert condition(CHAT, route, FAMILIES, templates=EMPTY_WORDING).tools == allowed_tools(route, FAMILIES)


_MODES: tuple[Literal["rewrite", "append"], ...] = ("rewrite", "append")


def test_notes_go_to_the_system_message_or_become_one() -> None:
    said = "Answer directly, without tools."
    assert [m.content for m in condition(CHAT, ANSWER, FAMILIES).messages] == [said, CHAT[0].content]
    system = [Message(role="system", content="Be kind."), *CHAT]
    assert condition(system, ANSWER, FAMILIES).messages[0].content == f"Be kind.\n\n{said}"
    assert condition([Message(role="system", content=""), *CHAT], ANSWER, FAMILIES).messages[0].content == said


@every_route
@every_variant
def test_chat_prompts_are_reversible_too(route: RouteAction, variant: str) -> None:
    for prompt in (CHAT, [Message(role="developer", content="Be kind."), *CHAT]):
        made = condition(prompt, route, FAMILIES, **VARIANTS[variant])
        assert unconditioned(made.messages) == prompt
        assert condition(made.messages, route, FAMILIES, **VARIANTS[variant]) == made


def test_a_routed_conversation_can_be_unconditioned() -> None:
    made = condition(CHAT, SEARCH, FAMILIES)
    reply = Message(role="assistant", content="12")
    assert unconditioned([*made.messages, reply]) == [*CHAT, reply]


def test_appending_refuses_what_it_cannot_hide() -> None:
    made = condition(CHAT, SEARCH, FAMILIES, mode="append")
    assert (made.tools, made.forbidden) == (None, ("calculator",))
    assert made.messages[0].content == f"{CHAT[0].content}\n\nYou may search with search, mail. Do not use calculator."
    soft = condition(CHAT, SEARCH, FAMILIES, mode="append", hard=False)
    assert soft.forbidden == ()
    assert (soft.messages[0].content or "").endswith("Avoid calculator.")
    assert condition(CHAT, ANSWER, FAMILIES, mode="append", hard=False).forbidden == tuple(FAMILIES)


def test_a_family_without_tools_says_so() -> None:
    made = condition(CHAT, SEARCH, {"calculator": Family.CALCULATE})
    assert made.tools == ()
    assert made.messages[0].content == "There are no search tools: answer directly."


def test_other_parts_of_a_message_are_kept() -> None:
    call = ToolCall(id="1", name="search")
    prompt = [Message(role="tool", content="12", tool_call_id="1", name="search", tool_calls=[call])]
    (made,) = condition(prompt, ANSWER, FAMILIES, mode="append").messages
    assert (made.role, made.tool_call_id, made.name, made.tool_calls) == ("tool", "1", "search", [call])


def test_nothing_to_condition() -> None:
    assert condition([], ANSWER, FAMILIES, mode="append") == ConditionedPrompt([], None, tuple(FAMILIES))
    assert condition(CHAT, "search", {}, templates=EMPTY_WORDING) == ConditionedPrompt(CHAT, ())


def test_a_call_that_the_route_forbids_is_an_error_that_the_model_reads() -> None:
    tools = build_tools(["calculator", "search"])
    task = Task(task_id="t", prompt=CHAT, tools=["calculator", "search"])
    offered = condition(task.prompt, CALCULATE, families_of_task(task, tools)).tools
    env = ToolEnv(task, tools, offered=offered)

    async def call() -> Any:
        await env.reset()
        try:
            return await env.step({"tool_calls": [ToolCall(id="1", name="search", arguments={"query": "Alder"})]})
        finally:
            await env.close()

    messages, _, done, info = asyncio.run(call())
    assert [spec["function"]["name"] for spec in env.tool_specs()] == ["calculator"]
    assert messages[0].content == "error: there is no tool 'search'; tools: calculator"
    assert (done, info["failed_calls"], info["cost"]) == (False, {"unknown_tool": 1}, 0)


def test_the_wording_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[chat.ANSWER]\nnote = "Just {{ \'say\' if hard }} it."\n[chat.SEARCH-FAMILY]\nnote = ""\n')
    mine = load_wording(path)
    assert condition(CHAT, ANSWER, FAMILIES, templates=mine).messages[0].content == "Just say it."
    assert condition(CHAT, SEARCH, FAMILIES, templates=mine).messages is CHAT
    shipped = condition(CHAT, CALCULATE, FAMILIES)
    assert condition(CHAT, CALCULATE, FAMILIES, templates=mine) == shipped


def test_appending_keeps_the_tokens_of_all_but_the_prompts_last_words() -> None:
    """So that the original's KV cache is a prefix of every route's prompt."""
    from transformers import AutoTokenizer

    from toolwise.models import locate
    from toolwise.rollout.chat_tokenizer import ChatTokenizer

    chat = ChatTokenizer(AutoTokenizer.from_pretrained(locate("builtin:small")))
    specs = [tool_spec(tool) for tool in build_tools(["calculator", "search"]).values()]
    original = list(chat.start(CHAT, specs))
    closing = list(chat.start([Message(role="user", content="")], specs))
    tail = next(i for i, pair in enumerate(zip(original[::-1], closing[::-1], strict=False)) if len(set(pair)) > 1)
    for route in ROUTES:
        routed = list(chat.start(condition(CHAT, route, FAMILIES, mode="append").messages, specs))
        shared = next(i for i, pair in enumerate(zip(original, routed, strict=False)) if len(set(pair)) > 1)
        assert shared == len(original) - tail > len(original) - 5


NO_TOOLS = {"entries": "", "avoided": "", "first": [], "others": [], "avoid": [], "hard": True}


def test_the_shipped_file_has_every_template() -> None:
    shipped = load_wording()
    for style in ("rlla", "chat"):
        for route in ROUTES:
            for part in PARTS[style]:
                assert (style, route, part) in shipped.templates


def test_the_empty_wording_adds_nothing() -> None:
    assert load_wording("silent") is EMPTY_WORDING
    assert EMPTY_WORDING.render("rlla", ROUTES[0], "note", NO_TOOLS) == ""
    assert ("rlla", ROUTES[0], "note") not in EMPTY_WORDING.templates


def test_a_copy_overrides_only_what_it_contains(tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text('[rlla.ANSWER]\nnote = "No."\n')
    mine, shipped = load_wording(path), load_wording()
    assert mine.render("rlla", ROUTES[0], "note", NO_TOOLS) == "No."
    assert {key for key in shipped.templates if mine.templates[key] != shipped.templates[key]} == {
        ("rlla", ROUTES[0], "note")
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[chatt.ANSWER]\nnote = ''", "unknown key `chatt` \\(did you mean `chat`\\?\\)"),
        ("[chat.ANSWERS]\nnote = ''", "`chat.ANSWERS` must be 'ANSWER', .*did you mean 'ANSWER'\\?"),
        ("[chat.ANSWER]\nblock = ''", "unknown key `chat.ANSWER.block` \\(known keys: note, append\\)"),
        ("[chat.ANSWER]\nnote = 3", "`chat.ANSWER.note` must be a valid string, got 3"),
        ("[chat]\nANSWER = 3", "`chat.ANSWER` must be a table, got 3"),
        ("chat = 3", "`chat` must be a table, got 3"),
        ("[chat.ANSWER]\nnote = '{{ tool }}'", "chat.ANSWER.note: 'tool' is undefined"),
        ("[chat.ANSWER]\nnote = '{% if %}'", "chat.ANSWER.note: "),
        ('[chat.ANSWER]\nnote = "{{ first.__class__.__mro__ }}"', "chat.ANSWER.note: access to attribute"),
        ("[chat", "is not valid TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "words.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        load_wording(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_wording(tmp_path / "none.toml")
