"""The tokens of a turn: validated and packed when they are created, readable like the policy's dictionary."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from array import array
from typing import Any

import numpy as np
import pytest

from toolwise.messages import Prefix
from toolwise.types import SampledTokens, StepData

TOLD: dict[str, Any] = {
    "token_ids": [5, 6],
    "logprobs": [-0.1, -0.2],
    "prompt_ids": (1, 2, 3),
    "finish_reason": "length",
    "policy_version": 3,
    "alignment": "clean",
}


def test_a_dictionary_becomes_packed_fields() -> None:
    tokens = SampledTokens.from_dict(TOLD)
    assert (tokens.token_ids, tokens.prompt_ids) == (array("i", [5, 6]), array("i", [1, 2, 3]))
    assert list(tokens.logprobs) == [-0.1, -0.2]  # no digit is lost
    assert (tokens.finish_reason, tokens.policy_version, tokens.alignment) == ("length", 3, "clean")
    assert tokens.has_ids
    assert SampledTokens.from_dict(tokens) is tokens


def test_shared_prompts_are_kept_and_arrays_keep_their_type() -> None:
    told = {"token_ids": array("i", [5]), "logprobs": array("f", [-0.1]), "prompt_ids": Prefix(array("i", [1, 2]), 1)}
    tokens = SampledTokens.from_dict(told)
    assert tokens.prompt_ids is told["prompt_ids"]
    assert (tokens.token_ids, tokens.logprobs) == (told["token_ids"], told["logprobs"])
    assert tokens.logprobs.typecode == "f"  # type: ignore[attr-defined]


def test_what_a_policy_does_to_its_arrays_later_changes_nothing() -> None:
    told = {key: array(kind, [1, 2]) for key, kind in (("token_ids", "i"), ("logprobs", "d"), ("prompt_ids", "i"))}
    tokens = SampledTokens.from_dict(told)
    for values in told.values():
        values[0] = 7
    assert [list(tokens[key]) for key in told] == [[1, 2]] * 3


@pytest.mark.parametrize("pack", [tuple, np.array])
def test_ids_may_come_in_any_sequence(pack: Any) -> None:
    tokens = SampledTokens.from_dict({**TOLD, "token_ids": pack([5, 6]), "logprobs": pack([-0.1, -0.2])})
    assert tokens == SampledTokens.from_dict(TOLD)


def test_it_reads_like_the_policys_dictionary() -> None:
    tokens = SampledTokens.from_dict({**TOLD, "entropies": [0.5, 0.25]})
    assert {key: list(tokens[key]) for key in ("token_ids", "logprobs", "prompt_ids", "entropies")} == {
        "token_ids": [5, 6],
        "logprobs": [-0.1, -0.2],
        "prompt_ids": [1, 2, 3],
        "entropies": [0.5, 0.25],
    }
    assert tokens.get("finish_reason") == "length"
    assert "content" not in tokens
    assert set(tokens) == {*TOLD, "entropies"}
    assert SampledTokens.from_dict({**tokens}) == tokens


@pytest.mark.parametrize(
    "told", [{}, {"finish_reason": "stop"}, {"token_ids": None, "logprobs": [-1.0]}, {"tokens": ["a"], "prompt_ids": 7}]
)
def test_text_without_ids_has_no_tokens_and_keeps_what_the_policy_said(told: dict[str, Any]) -> None:
    tokens = SampledTokens.from_dict(told)
    assert not tokens.has_ids
    assert (len(tokens.token_ids), len(tokens.logprobs), len(tokens.prompt_ids)) == (0, 0, 0)
    assert dict(tokens) == told


def test_a_numpy_integer_is_a_version() -> None:
    version = SampledTokens.from_dict(TOLD | {"policy_version": np.int64(4)}).policy_version
    assert (version, type(version)) == (4, int)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": None}, "got token_ids without logprobs"),
        ({"prompt_ids": None}, "got token_ids without prompt_ids"),
        ({"logprobs": [-0.1]}, "got 2 token_ids but 1 logprobs"),
        ({"logprobs": [-0.1, math.nan]}, "NaN or infinity"),
        ({"logprobs": [-math.inf, math.inf]}, "NaN or infinity"),
        ({"logprobs": [-0.1, None]}, "logprobs must be a list of log-probs"),
        ({"token_ids": ["a", "b"]}, "token_ids must be a list of token ids"),
        ({"token_ids": [1, 2**40]}, "token_ids must be a list of token ids"),
        ({"token_ids": 7}, "token_ids must be a list of token ids"),
        ({"token_ids": [1, -1]}, "token_ids contain -1: token ids are 0 or more"),
        ({"prompt_ids": array("i", [-7, 2])}, "prompt_ids contain -7: token ids are 0 or more"),
        ({"prompt_ids": "text"}, "prompt_ids must be a list of token ids"),
        ({"finish_reason": ["stop"]}, "finish_reason must be of type str, not list"),
        ({"policy_version": "3"}, "policy_version must be of type int, not str"),
    ],
)
def test_a_malformed_dictionary_is_refused_with_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        SampledTokens.from_dict({**TOLD, **change})
    assert "\n" not in str(caught.value)


def test_lengths_are_checked_wherever_tokens_are_created() -> None:
    with pytest.raises(ValueError, match="got 1 token_ids but 0 logprobs"):
        SampledTokens([1], [], [2])


def test_it_is_frozen_smaller_than_a_dictionary_and_can_be_copied() -> None:
    tokens = SampledTokens.from_dict(TOLD)
    with pytest.raises(AttributeError):
        tokens.policy_version = 4  # type: ignore[misc]
    assert sys.getsizeof(tokens) < sys.getsizeof(TOLD)
    assert pickle.loads(pickle.dumps(tokens)) == copy.deepcopy(tokens) == tokens


def a_step(logprobs: Any) -> StepData:
    return StepData(
        system_step_index=0,
        observation_data=[],
        action_taken={"type": "text"},
        resulting_messages_history=[],
        policy_logprobs=logprobs,
    )


def test_a_step_takes_a_dictionary_and_reads_as_both() -> None:
    step = a_step(TOLD)
    assert step.tokens is step.policy_logprobs
    assert list(step.tokens.token_ids) == [5, 6]
    assert step.policy_logprobs is not None
    assert list(step.policy_logprobs["token_ids"]) == [5, 6]


def test_a_step_without_log_probs_has_empty_tokens() -> None:
    step = a_step(None)
    assert step.policy_logprobs is None
    assert (len(step.tokens.token_ids), step.tokens.finish_reason, step.tokens.has_ids) == (0, None, False)


def test_an_unvalidated_copy_with_a_dictionary_has_tokens_too() -> None:
    step = a_step(None).model_copy(update={"policy_logprobs": TOLD})
    assert list(step.tokens.token_ids) == [5, 6]
