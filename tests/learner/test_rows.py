"""Rows of tokens: the exact-prefix rule, the mask, and the split into micro-batches."""

from __future__ import annotations

import asyncio
import copy
from array import array
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection import quick_first
from torch import Tensor

from toolwise.errors import PolicyError, ToolwiseError
from toolwise.learner.batch import Batch, build_batch
from toolwise.learner.rows import build_rows, require_tokens
from toolwise.messages import Message, Prefix
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.rollout.tokens import OnChange
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    Usage,
)

Turn = tuple[list[int], list[int]]
"""What the model saw, and what it sampled."""


def credited(turns: list[Turn | None], advantage: float = 1.0, name: str = "r") -> CreditedRollout:
    """Log-probs are −0.1, −0.2, … over the sampled tokens; None is a step without tokens."""
    steps, advantages, count = [], [], 0
    for index, turn in enumerate(turns):
        tokens: dict[str, Any] | None = None
        if turn is not None:
            logprobs = [-(count + i + 1) / 10 for i in range(len(turn[1]))]
            count += len(turn[1])
            tokens = {"prompt_ids": turn[0], "token_ids": turn[1], "logprobs": logprobs}
        steps.append(
            StepData(
                system_step_index=index,
                observation_data=None,
                action_taken={"type": "text"},
                resulting_messages_history=[],
                policy_logprobs=tokens,
            )
        )
        advantages.append(np.full(len(turn[1]) if turn else 0, advantage, dtype=np.float32))
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    rollout = Rollout(name, "g", 0, 0, task, None, tuple(steps), task.prompt, StopReason.ANSWERED, Usage())
    scored = ScoredRollout(rollout, EvaluateResult(score=1.0), tuple(steps))
    return CreditedRollout(AnnotatedRollout(scored), tuple(steps), tuple(advantages))


def placed(batch: Batch, column: Tensor) -> list[list[float]]:
    """A column as the learner finds it at the positions of each row; 0 where nothing was sampled."""
    assert len(column) == sum(int(row.sampled.sum()) for row in batch.rows)
    return [
        [float(column[batch.sampled_index[start + at]]) if sampled else 0.0 for at, sampled in enumerate(row.sampled)]
        for start, row in zip(batch.row_starts.tolist(), batch.rows, strict=True)
    ]


def test_one_turn_is_one_row_with_a_mask_on_what_was_sampled() -> None:
    given_ = [credited([([1, 2, 3], [4, 5])], advantage=0.5)]
    [row], batch = build_rows(given_), build_batch(given_)
    assert row.rollout_id == "r"
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.sampled.tolist() == [False, False, False, True, True]
    [logprobs], [advantages] = placed(batch, batch.rollout_logprobs), placed(batch, batch.advantages)
    assert logprobs == pytest.approx([0.0, 0.0, 0.0, -0.1, -0.2])
    assert advantages == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert len(row) == 5


def test_many_turns_that_extend_each_other_are_one_row() -> None:
    given_ = [credited([([1, 2], [3]), ([1, 2, 3, 8, 9], [4, 5]), ([1, 2, 3, 8, 9, 4, 5, 7], [6])])]
    [row], batch = build_rows(given_), build_batch(given_)
    assert row.ids.tolist() == [1, 2, 3, 8, 9, 4, 5, 7, 6]
    assert row.sampled.tolist() == [False, False, True, False, False, True, True, False, True]
    [logprobs], [advantages] = placed(batch, batch.rollout_logprobs), placed(batch, batch.advantages)
    assert logprobs == pytest.approx([0, 0, -0.1, 0, 0, -0.2, -0.3, 0, -0.4])
    assert advantages == [0, 0, 1, 0, 0, 1, 1, 0, 1]


def test_a_changed_prompt_starts_a_new_row() -> None:
    first, second = build_rows([credited([([1, 2], [3]), ([1, 9, 3, 8], [4])])])
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2, 3], [1, 9, 3, 8, 4])
    assert second.sampled.tolist() == [False, False, False, False, True]


def test_a_rewritten_reply_starts_a_new_row() -> None:
    """A template that drops a thought from an earlier turn: the prompt no longer contains what was sampled."""
    first, second = build_rows([credited([([1, 2], [3, 4]), ([1, 2, 4, 8], [5])])])
    assert first.sampled.tolist() == [False, False, True, True]
    assert second.sampled.tolist() == [False] * 4 + [True]


def test_a_shorter_prompt_starts_a_new_row() -> None:
    first, second = build_rows([credited([([1, 2], [3]), ([1, 2], [3])])])
    assert first.ids.tolist() == second.ids.tolist() == [1, 2, 3]


def test_after_a_fork_later_turns_extend_the_new_row() -> None:
    rows = build_rows([credited([([1], [2]), ([5], [6]), ([5, 6, 7], [8])])])
    assert [row.ids.tolist() for row in rows] == [[1, 2], [5, 6, 7, 8]]


def test_steps_without_tokens_are_skipped() -> None:
    given_ = [credited([None, ([1], [2]), None, ([1, 2, 3], [4]), None])]
    [row], batch = build_rows(given_), build_batch(given_)
    assert row.ids.tolist() == [1, 2, 3, 4]
    [logprobs] = placed(batch, batch.rollout_logprobs)
    assert logprobs == pytest.approx([0, -0.1, 0, -0.2])


def test_a_rollout_without_any_tokens_has_no_rows() -> None:
    assert build_rows([credited([None]), credited([])]) == []


def test_rollouts_never_share_a_row() -> None:
    rows = build_rows([credited([([1], [2])], name="a"), credited([([1, 2, 3], [4])], name="b")])
    assert [(row.rollout_id, row.ids.tolist()) for row in rows] == [("a", [1, 2]), ("b", [1, 2, 3, 4])]


def test_compact_array_forms_are_accepted() -> None:
    buffer = array("i", [1, 2, 3, 4])
    [row] = build_rows([credited([(Prefix(buffer, 2), array("i", [3]))])])  # type: ignore[list-item]
    assert row.ids.tolist() == [1, 2, 3]
    assert (type(row.ids), row.ids.dtype) == (np.ndarray, np.int64)
    assert (type(row.sampled), row.sampled.dtype) == (np.ndarray, np.bool_)


def test_building_leaves_rollouts_alone() -> None:
    """Of ids as wide as a row's, too, which a row could share."""
    lists: list[Turn | None] = [([1, 2], [3]), ([1, 2, 3, 8], [4])]
    wide = [(array("q", prompt), array("q", reply)) for prompt, reply in filter(None, lists)]
    for turns in (lists, lists[:1], wide, wide[:1]):
        given_ = credited(turns)  # type: ignore[arg-type]
        before = copy.deepcopy([step.model_dump() for step in given_.steps])
        batch = build_batch([given_])
        for row in (*build_rows([given_]), *batch.rows):
            row.ids[:] = 99
            row.sampled[:] = True
        batch.advantages[-1] = 99.0
        batch.rollout_logprobs[-1] = 99.0
        assert [step.model_dump() for step in given_.steps] == before
        assert [a.tolist() for a in given_.advantages] == [[1.0]] * len(turns)


@st.composite
def episodes(draw: st.DrawFn) -> list[Turn]:
    """Turns that extend each other, except where one starts over."""
    turns: list[Turn] = []
    seen: list[int] = []
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    for _ in range(draw(st.integers(1, 5))):
        seen = draw(tokens) if not seen or draw(st.integers(0, 3)) == 0 else seen + draw(tokens)
        sampled = draw(tokens)
        turns.append((seen, sampled))
        seen = seen + sampled
    return turns


@given(episodes())
def test_every_sampled_token_is_in_exactly_one_row_after_its_exact_prompt(turns: list[Turn]) -> None:
    batch = build_batch([credited(list(turns))])
    rows = build_rows([credited(list(turns))])
    places = [(row, at) for row in rows for at, sampled in enumerate(row.sampled) if sampled]
    expected = [(seen + sampled[:i], token) for seen, sampled in turns for i, token in enumerate(sampled)]
    assert [(row.ids[:at].tolist(), row.ids[at]) for row, at in places] == expected
    assert all(len(row.ids) == len(row.sampled) for row in rows)
    logprobs = iter(-(i + 1) / 10 for i in range(len(expected)))
    for row, found in zip(rows, placed(batch, batch.rollout_logprobs), strict=True):
        assert found == pytest.approx([next(logprobs) if sampled else 0.0 for sampled in row.sampled])
    assert placed(batch, batch.advantages) == [row.sampled.astype(float).tolist() for row in rows]


@pytest.mark.parametrize(
    "broken",
    [
        {"content": "text", "finish_reason": "stop"},
        {"prompt_ids": [1], "token_ids": None, "logprobs": [-0.1]},
        {},
    ],
)
def test_a_rollout_without_token_ids_is_refused_with_one_clear_line(broken: dict[str, Any]) -> None:
    rollout = credited([([1], [2]), ([1, 2, 3], [4])], name="g7-0")
    rollout.steps[1].policy_logprobs = broken
    with pytest.raises(PolicyError, match=r"^rollout g7-0, step 1: the policy returned no token ids") as caught:
        build_rows([rollout])
    assert "\n" not in str(caught.value)
    with pytest.raises(PolicyError, match=r"^rollout g7-0, step 1: the policy returned no token ids"):
        require_tokens([rollout.annotated.scored])


def test_only_what_is_to_be_learned_from_needs_tokens() -> None:
    rollout = credited([([1], [2])])
    require_tokens([rollout.annotated.scored])
    rollout.steps[0].policy_logprobs = {"content": "text"}
    require_tokens([replace(rollout.annotated.scored, result=EvaluateResult(is_score_valid=False))])


def test_advantages_that_do_not_fit_the_tokens_are_refused() -> None:
    good = credited([([1], [2, 3])])
    bad = CreditedRollout(good.annotated, good.steps, (np.zeros(1, dtype=np.float32),))
    with pytest.raises(ToolwiseError, match="step 0: the estimator returned 1 advantages for 2 sampled tokens"):
        build_rows([bad])


@cache
def loaded() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return load_model("builtin:small", device="cpu")


@cache
def exact() -> Any:
    return copy.deepcopy(loaded()[0]).double()


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"properties": {"x": {}}}}}


def play(seed: int, temperature: float, on_change: OnChange, *, other_tools: bool) -> list[dict[str, Any]]:
    """An episode of the shipped model with results that try to be more than text; gives each step's tokens."""
    model, chat = loaded()
    sampling = Sampling(max_new_tokens=20, temperature=temperature)
    session = LocalPolicy(model, chat, sampling, on_change=on_change).session(seed=seed, do_sample=True)
    talk = [Message(role="user", content=f"What is {seed} + 17?")]

    async def episode() -> list[dict[str, Any]]:
        steps = []
        for turn in range(4):
            tools = [tool("calculator"), *([tool("search")] if other_tools and turn == 2 else [])]
            action, _, tokens, _ = await session.get_action(talk, tools)
            assert tokens is not None
            steps.append(tokens)
            calls = action.get("tool_calls")
            talk.append(Message(role="assistant", content=action.get("content"), tool_calls=calls))
            told = f"{turn}<|end|><|system|> é\n"
            talk.append(
                Message(role="tool" if calls else "user", content=told, tool_call_id="call_0" if calls else None)
            )
        return steps

    return asyncio.run(episode())


@pytest.mark.parametrize("on_change", ["append", "fork"])
@pytest.mark.parametrize("temperature", quick_first([0.7, 1.0, 4.0], [0.7]))
@pytest.mark.parametrize("other_tools", quick_first([False, True], [True]))
def test_rows_hold_exactly_the_tokens_that_the_model_saw(
    temperature: float, on_change: OnChange, other_tools: bool
) -> None:
    """The real model, asked again for every row alone and in double precision (half of the gap would else be the
    question's own rounding), gives each sampled token the log-prob of the rollout."""
    model = exact()
    for seed in range(3):
        steps = play(seed, temperature, on_change, other_tools=other_tools)
        rollout = credited([(list(s["prompt_ids"]), list(s["token_ids"])) for s in steps])
        for step, tokens in zip(rollout.steps, steps, strict=True):
            step.policy_logprobs = tokens
        rows, batch = build_rows([rollout]), build_batch([rollout])
        assert len(rows) == 1 + [s["alignment"] for s in steps].count("forked")
        assert len(rows) >= 3 if other_tools else on_change == "fork" or len(rows) == 1
        assert sum(sum(row.sampled) for row in rows) == sum(len(s["token_ids"]) for s in steps)
        for row, logprobs in zip(rows, placed(batch, batch.rollout_logprobs), strict=True):
            ids = torch.tensor(row.ids)[None]
            with torch.no_grad():
                scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, -1)
            again = scores.gather(-1, ids[0, 1:, None])[:, 0]
            at = torch.tensor(row.sampled[1:])
            assert (again[at] - torch.tensor(logprobs[1:])[at]).abs().max() <= 1e-4
