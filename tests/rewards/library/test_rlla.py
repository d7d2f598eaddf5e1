"""The RLLA reward: worked examples, every option, all 480 gold answers, and properties for any calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message, ToolCall
from toolwise.rewards import Reward
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.library.rlla import RllaOptions, RllaScore, compute_score, match_calls, rlla_reward
from toolwise.types import EvaluateResult, Rollout, StopReason, Task, Usage

DATA = Path(__file__).parents[2] / "fixtures"
THOUGHT = "<think> I should use a tool. </think>"


def call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def answer(*calls: dict[str, Any], thought: str = THOUGHT) -> str:
    lines = "\n".join(json.dumps(c, ensure_ascii=False) for c in calls)
    return f"{thought}\n<tool_call>\n{lines}\n</tool_call>"


def correctness(made: Sequence[dict[str, Any]], gold: Sequence[dict[str, Any]], **options: Any) -> float:
    return compute_score(answer(*made), answer(*gold), options=RllaOptions(**options)).correctness


# The worked examples


GOLD = [call("search", page=1)]


@pytest.mark.parametrize(
    ("made", "gold", "expected"),
    [
        (GOLD, GOLD, 3),
        ([call("find", page=1)], GOLD, -3),
        ([call("search", page=2)], GOLD, 1),
        ([call("search", page="1")], GOLD, 1),
        ([call("search", page=1, extra=True)], GOLD, 2),
        ([call("a", x=1)], [call("a", x=1), call("b", y=2)], 0),
        ([call("b", y=2), call("a", x=1)], [call("a", x=1), call("b", y=2)], 3),
    ],
    ids=["right", "wrong name", "wrong value", "string for number", "extra parameter", "one of two", "swapped"],
)
def test_the_worked_examples(made: list[Any], gold: list[Any], expected: float) -> None:
    assert correctness(made, gold) == expected
    assert compute_score(answer(*made), answer(*gold)) == RllaScore(1 + expected, 1, expected, 0)


def test_a_call_made_twice_is_matched_once() -> None:
    # J(names) 1/2, parameters and value 2, of 3
    assert correctness(GOLD * 2, GOLD) == pytest.approx(6 * 2.5 / 3 - 3)


def test_each_of_two_equal_gold_calls_wants_its_own() -> None:
    # J(names) 1/2, one of two matched: 2 of 4, of M = 5
    assert correctness(GOLD, GOLD * 2) == pytest.approx(6 * 2.5 / 5 - 3)


def test_the_best_call_of_that_name_is_taken_and_the_first_of_equals() -> None:
    gold = [call("f", a=1, b=2), call("f", a=1, b=3)]
    # The first gold call takes the complete one; the second gets the other.
    assert correctness([call("f", a=9, b=9), call("f", a=1, b=2)], gold) == pytest.approx(6 * (1 + 3 + 1) / 7 - 3)
    # Both predicted calls score 2 for the first gold call: it takes the first and leaves the better one to the second.
    assert correctness([call("f", a=1, b=0), call("f", a=1, b=3)], [call("f", a=1, b=2), call("f", a=1, b=3)]) == (
        pytest.approx(6 * (1 + 2 + 3) / 7 - 3)
    )


def test_a_call_that_earns_nothing_is_left_to_others() -> None:
    gold = [call("f", a=1), call("f")]
    # `f()` is worth nothing to f(a=1), so it is there for f().
    assert correctness([call("f")], gold) == pytest.approx(6 * (0.5 + 1) / 4 - 3)


def test_calls_without_parameters_are_whole() -> None:
    assert correctness([call("now"), call("here")], [call("here"), call("now")]) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no tags at all",
        THOUGHT,
        f"{THOUGHT}\n<tool_call>\n</tool_call>",
        f"{THOUGHT}\n<tool_call>\nnot json\n</tool_call>",
        f'{THOUGHT}\n<tool_call>\n{{"name": "search", "parameters": {{"page": 1}}}}',
        f'{THOUGHT}\n<tool_call>\n{{"name": "search"}}\n</tool_call>',
        f'{THOUGHT}\n<tool_call>\n{{"name": "search", "arguments": {{"page": 1}}}}\n</tool_call>',
        f'{THOUGHT}\n<tool_call>\n{{"name": "search", "parameters": [1]}}\n</tool_call>',
        f'{THOUGHT}\n<tool_call>\n{{"name": ["search"], "parameters": {{}}}}\n</tool_call>',
        f'{THOUGHT}\n<tool_call>\n[{{"name": "search", "parameters": {{"page": 1}}}}]\n</tool_call>',
        f"{THOUGHT}\n<tool_call>\n{'[' * 100_000}\n</tool_call>",
        f'{THOUGHT}\n<tool_call>\n{{"name": "search", "parameters": {{"page": NaN}}}}\n</tool_call>',
        f'{THOUGHT}\n<tool_call>\n{{"name": "search", "parameters": {{"page": {"9" * 5000}}}}}\n</tool_call>',
    ],
)
def test_what_cannot_be_read_earns_the_least(text: str) -> None:
    assert compute_score(text, answer(*GOLD)).correctness == -3


def test_one_unreadable_line_spoils_the_block() -> None:
    text = answer(*GOLD).replace("\n</tool_call>", "\noops\n</tool_call>")
    assert compute_score(text, answer(*GOLD)).correctness == -3


def test_without_a_gold_call_correctness_is_nought_whatever_is_called() -> None:
    gold = f"{THOUGHT}\n<response> Hello. </response>"
    assert compute_score(gold, gold) == RllaScore(1, 1, 0, 0)
    assert compute_score(answer(*GOLD), gold) == RllaScore(0, 0, 0, 0)


# The gold answers


def gold_answers() -> list[str]:
    import pyarrow.parquet as pq

    rows = pq.read_table(DATA / "rlla_test.parquet").to_pylist()
    supervised = json.loads((DATA / "rlla_sft.json").read_text(encoding="utf-8"))
    return [row["reward_model"]["ground_truth"] for row in rows] + [row["output"] for row in supervised]


def test_all_480_gold_answers_score_the_most() -> None:
    scores = [compute_score(gold, gold) for gold in gold_answers()]
    assert len(scores) == 480
    assert {score for score in scores if score.correctness} == {RllaScore(4, 1, 3, 0)}
    assert {score for score in scores if not score.correctness} == {RllaScore(1, 1, 0, 0)}
    assert sum(score.correctness == 3 for score in scores) == 417


def test_under_upstream_s_rule_17_gold_answers_fail_for_a_tag_in_their_thought() -> None:
    failed = [gold for gold in gold_answers() if compute_score(gold, gold, options=LITERAL).format == 0]
    assert len(failed) == 17
    assert all("<tool_call>" in gold.partition("</think>")[0] for gold in failed)
    assert all(compute_score(gold, gold, options=LITERAL).correctness == 3 for gold in failed)


LITERAL = RllaOptions(literal_tags=True)


# Options


def test_a_smaller_tool_range() -> None:
    assert correctness(GOLD, GOLD, tool_range=1) == 1
    assert correctness([call("find")], GOLD, tool_range=1) == -1
    assert correctness([call("search", page=2)], GOLD, tool_range=1) == pytest.approx(2 * 2 / 3 - 1)


@pytest.mark.parametrize(("step", "form", "tool"), [(0, 1, 1), (29, 1, 1), (30, 0.5, 3), (1000, 0.5, 3)])
def test_two_stages(step: int, form: float, tool: float) -> None:
    options = RllaOptions(schedule="two_stage")
    assert compute_score(answer(*GOLD), answer(*GOLD), step, options) == RllaScore(form + tool, form, tool, 0)
    assert compute_score("nothing", answer(*GOLD), step, options) == RllaScore(-tool, 0, -tool, 0)


@pytest.mark.parametrize(
    ("step", "form_most", "form_least", "tool"),
    [(0, 2, -2, 2), (75, 1.5, -1, 2.5), (30, 1.8, -1.6, 2.2), (150, 1, -1, 3), (900, 1, -1, 3)],
)
def test_the_linear_schedule(step: int, form_most: float, form_least: float, tool: float) -> None:
    options = RllaOptions(schedule="linear")
    best = compute_score(answer(*GOLD), answer(*GOLD), step, options)
    worst = compute_score("nothing", answer(*GOLD), step, options)
    assert (best.format, best.correctness) == pytest.approx((form_most, tool))
    assert (worst.format, worst.correctness) == pytest.approx((form_least, -tool))


def test_refined_wants_names_and_parameters_in_their_order() -> None:
    gold = [call("a", x=1, y=2), call("b")]
    swapped = [call("b"), call("a", x=1, y=2)]
    assert correctness(swapped, gold, matching="refined") == pytest.approx(6 * (0 + 3 + 1) / 5 - 3)
    reordered = [call("a", y=2, x=1), call("b")]
    # Python's dictionaries are equal whatever their order, and equal lists of calls earn the maximum.
    assert correctness(reordered, gold, matching="refined") == 3
    assert correctness([call("a", y=2, x=3), call("b")], gold, matching="refined") == pytest.approx(6 * 3 / 5 - 3)


def test_intermediate_takes_a_call_whole_or_not_at_all() -> None:
    gold = [call("a", x=1), call("b", y=2)]
    assert correctness([call("a", x=1), call("b", y=3)], gold, matching="intermediate") == pytest.approx(6 * 2 / 3 - 3)
    assert correctness([call("b", y=2), call("a", x=1)], gold, matching="intermediate") == 3
    assert correctness([call("a", x=1)], gold, matching="intermediate") == pytest.approx(6 * 1.5 / 3 - 3)


def test_coarse_is_all_or_nothing_and_order_counts() -> None:
    gold = [call("a", x=1), call("b", y=2)]
    assert correctness(gold, gold, matching="coarse") == 3
    assert correctness(gold[::-1], gold, matching="coarse") == -3
    assert correctness([call("a", x=1)], gold, matching="coarse") == -3


@pytest.mark.parametrize(
    ("words", "kind", "step", "expected"),
    [
        (256, "fixed", 0, 0.5),
        (256, "fixed", 500, 0.5),
        (100, "fixed", 0, 0.2),
        (600, "fixed", 0, 1.0),
        (0, "fixed", 0, 0.0),
        (96, "scheduled", 0, 0.25),
        (320, "scheduled", 105, 0.5),
        (320, "off", 105, 0.0),
    ],
)
def test_length(words: int, kind: Any, step: int, expected: float) -> None:
    text = answer(*GOLD, thought=f"<think> {'word ' * words}</think>")
    score = compute_score(text, answer(*GOLD), step, RllaOptions(length_reward=kind))
    assert score.length == expected
    assert score.score == 4 + expected


def test_without_a_whole_thought_there_is_no_length() -> None:
    options = RllaOptions(length_reward="fixed")
    assert compute_score("<think> " + "word " * 600, answer(*GOLD), options=options).length == 0
    assert compute_score("word " * 600 + "</think>", answer(*GOLD), options=options).length == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "twostage"}, "must be one of constant, two_stage, linear"),
        ({"matching": "exact"}, "must be one of fine"),
        ({"length_reward": True}, "must be one of off"),
        ({"tool_range": 0}, "tool_range"),
        ({"tool_range": float("inf")}, "tool_range"),
        ({"tool_range": 1.0, "schedule": "linear"}, "leave tool_range out"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RllaOptions(**wrong)


@pytest.mark.parametrize(
    "truth",
    [
        None,
        [{"name": "f", "parameters": {}}],
        f"{THOUGHT}\n<tool_call>\nnot json\n</tool_call>",
        f"{THOUGHT}\n<tool_call>\n",
        f'{THOUGHT}\n<tool_call>\n{{"name": "f"}}\n</tool_call>',
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error_and_no_score(truth: Any) -> None:
    with pytest.raises(DataError):
        compute_score(answer(*GOLD), truth)


# Properties for any calls

names = st.sampled_from(["search", "search ", "calculate", "поиск", "天気", "a.b-c", ""])
keys = st.sampled_from(["q", "page", "ключ", "名", "q ", "nested"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0])
    | st.text("a1é\u2028\\\"'\n", max_size=3)
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=2) | st.dictionaries(keys, v, max_size=2), max_leaves=4)
calls = st.builds(
    lambda name, parameters: {"name": name, "parameters": parameters}, names, st.dictionaries(keys, values, max_size=3)
)
call_lists = st.lists(calls, min_size=1, max_size=4)
matchings = st.sampled_from(["fine", "refined", "intermediate", "coarse"])


@settings(deadline=None)
@given(call_lists, matchings)
def test_gold_is_the_maximum(gold: list[dict[str, Any]], matching: Any) -> None:
    assert correctness(gold, gold, matching=matching) == 3


@settings(deadline=None)
@given(call_lists, call_lists, matchings, st.integers(0, 300), st.sampled_from(["constant", "two_stage", "linear"]))
def test_the_score_stays_in_its_range(
    made: list[dict[str, Any]], gold: list[dict[str, Any]], matching: Any, step: int, schedule: Any
) -> None:
    options = RllaOptions(matching=matching, schedule=schedule)
    least, most = options.tool_bounds(step)
    assert least <= compute_score(answer(*made), answer(*gold), step, options).correctness <= most


@settings(deadline=None)
@given(call_lists, st.data())
def test_the_order_of_calls_does_not_matter_to_gold(gold: list[dict[str, Any]], data: st.DataObject) -> None:
    assert correctness(data.draw(st.permutations(gold)), gold) == 3


@settings(deadline=None)
@given(calls, calls, st.data())
def test_the_order_of_parameters_never_matters(made: dict[str, Any], gold: dict[str, Any], data: st.DataObject) -> None:
    shuffled = {"name": made["name"], "parameters": dict(data.draw(st.permutations(list(made["parameters"].items()))))}
    assert correctness([shuffled], [gold]) == correctness([made], [gold])


@settings(deadline=None)
@given(call_lists, st.integers(0, 3))
def test_a_duplicated_call_costs(gold: list[dict[str, Any]], which: int) -> None:
    assert correctness([*gold, gold[which % len(gold)]], gold) < 3


@settings(deadline=None)
@given(call_lists, st.integers(0, 3), values)
def test_an_extra_parameter_costs(gold: list[dict[str, Any]], which: int, value: Any) -> None:
    made = [dict(c) for c in gold]
    place = which % len(made)
    made[place]["parameters"] = {**made[place]["parameters"], "one more": value}
    assert -3 < correctness(made, gold) < 3


@settings(deadline=None)
@given(call_lists)
def test_keys_beside_name_and_parameters_do_not_matter(gold: list[dict[str, Any]]) -> None:
    assert correctness([{**c, "id": "call_0"} for c in gold], gold) == 3


@settings(deadline=None)
@given(call_lists, st.data())
def test_leaving_a_call_out_costs(gold: list[dict[str, Any]], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(gold), max_size=len(gold) - 1, unique_by=id))
    assert compute_score(answer(*kept), answer(*gold)).correctness < 3


thoughts = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<response>",
            "</response>",
            "<think>",
            '{"name": "x", "parameters": {}}',
            "\n",
            "hm",
            "é",
        ]
    ),
    max_size=8,
).map(" ".join)


@settings(deadline=None)
@given(call_lists, thoughts, thoughts)
def test_tags_named_in_a_thought_change_nothing(gold: list[dict[str, Any]], mine: str, theirs: str) -> None:
    made = answer(*gold, thought=f"<think>{mine}</think>")
    truth = answer(*gold, thought=f"<think>{theirs}</think>")
    assert compute_score(made, truth) == RllaScore(4, 1, 3, 0)


@settings(deadline=None)
@given(st.text('a<>/thinktool_call\n{}"', max_size=60), call_lists)
def test_no_text_breaks_it(text: str, gold: list[dict[str, Any]]) -> None:
    score = compute_score(text, answer(*gold))
    assert score.format in (0, 1)
    assert -3 <= score.correctness <= 3


def formula(gold: list[dict[str, Any]], made: list[dict[str, Any]]) -> float:
    """6·s/M − 3: an independent, straightforward implementation."""

    def jaccard(a: list[str], b: list[str]) -> float:
        if a == b:
            return 1.0
        rest, shared = list(b), 0
        for item in a:
            if item in rest:
                rest.remove(item)
                shared += 1
        return shared / (len(a) + len(b) - shared) if a and b else 0.0

    s = jaccard([c["name"] for c in gold], [c["name"] for c in made])
    left = list(enumerate(made))
    for wanted in gold:
        best: tuple[float, int] | None = None
        for place, candidate in left:
            if candidate["name"] != wanted["name"]:
                continue
            a, b = wanted["parameters"], candidate["parameters"]
            worth = jaccard(sorted(a), sorted(b)) + sum(k in b and b[k] == v for k, v in a.items())
            if worth > 0 and (best is None or worth > best[0]):
                best = worth, place
        if best is not None:
            s += best[0]
            left = [(p, c) for p, c in left if p != best[1]]
    return 6 * s / (1 + sum(1 + len(c["parameters"]) for c in gold)) - 3


@settings(max_examples=300, deadline=None)
@given(call_lists, call_lists)
def test_it_is_the_formula(gold: list[dict[str, Any]], made: list[dict[str, Any]]) -> None:
    expected = 3 if gold == made else formula(gold, made)
    assert correctness(made, gold) == pytest.approx(expected)
    assert 0 <= match_calls(gold, made) <= 1


# As a reward


def said(content: str, tool_calls: list[ToolCall] | None = None) -> list[Message]:
    return [
        Message(role="system", content="**Available Tools**"),
        Message(role="user", content="go"),
        Message(role="assistant", content=content, tool_calls=tool_calls),
    ]


def test_the_reward_says_its_parts() -> None:
    result = rlla_reward(said(answer(*GOLD)), answer(*GOLD))
    assert result.score == 4
    assert {name: metric.score for name, metric in result.metrics.items()} == {"format": 1, "correctness": 3}
    assert result.reason == "format 1, correctness 3"


def test_the_first_decision_is_scored_whatever_came_after_it() -> None:
    later = [Message(role="tool", content="no such tool"), Message(role="assistant", content="oh")]
    assert rlla_reward([*said(answer(*GOLD)), *later], answer(*GOLD)).score == 4


def test_a_conversation_without_a_reply_earns_the_least() -> None:
    assert rlla_reward(said("x")[:2], answer(*GOLD)).score == -3


def test_calls_that_a_parser_took_out_of_the_text_are_scored_too() -> None:
    calls = [ToolCall(name="search", arguments={"page": 1})]
    assert rlla_reward(said(THOUGHT, calls), answer(*GOLD)).score == 4
    assert rlla_reward(said("", calls), answer(*GOLD)).score == 3
    two = ToolCall(name="", arguments="\n".join(json.dumps(c) for c in [GOLD[0], call("other")]))
    assert rlla_reward(said(THOUGHT, [two]), answer(*GOLD, call("other"))).score == 4


def test_messages_may_be_plain_dictionaries() -> None:
    messages: Any = [m.to_openai() for m in said(answer(*GOLD))]
    assert rlla_reward(messages, answer(*GOLD)).score == 4


def evaluate(kwargs: dict[str, Any], step: int, truth: Any) -> EvaluateResult:
    task = Task(task_id="t", prompt=said("")[:2], ground_truth=truth)
    rollout = Rollout("r", "g", 0, 0, task, None, (), said(answer(*GOLD)), StopReason.ANSWERED, Usage())
    reward = Reward.of("toolwise.rewards.library.rlla:rlla_reward", kwargs)
    return asyncio.run(InProcessExecutor().evaluate(reward, [rollout], step=step))[0]


def test_by_reference_it_is_given_the_training_step() -> None:
    assert evaluate({"schedule": "two_stage"}, 0, answer(*GOLD)).score == 2
    assert evaluate({"schedule": "two_stage"}, 30, answer(*GOLD)).score == 3.5


def test_a_bad_ground_truth_is_a_typed_fault() -> None:
    result = evaluate({}, 0, None)
    assert result.error is not None
    assert not result.has_valid_score
