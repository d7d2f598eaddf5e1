"""The table of built-in estimators."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolwise.advantages import ESTIMATORS, Gae, Gigpo, Grpo, build_estimator
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AnnotatedRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]
EACH = pytest.mark.parametrize("name", sorted(ESTIMATORS))

pytestmark = pytest.mark.filterwarnings("ignore::toolwise.advantages.SingletonAnchorsWarning")


def batch(step: Step, make: Make, scores: tuple[float, ...] = (1.0, 0.0, 0.5)) -> list[AnnotatedRollout]:
    return [
        make(
            score,
            "g",
            [step(0, state="s", tokens=2), step(1, tokens=None, state="t"), step(2, state="u", tokens=1)],
            values=[[0.1, 0.2], [], [0.3]],
            ref=[[-1.0, -1.0], [], [-1.0]],
        )
        for score in scores
    ]


@EACH
def test_each_is_a_frozen_dataclass_that_names_its_needs(name: str) -> None:
    made: Any = ESTIMATORS[name]()
    assert dataclasses.is_dataclass(made)
    assert made == ESTIMATORS[name]()
    assert type(made).__dataclass_params__.frozen
    assert made.needs <= {"old_logprobs", "ref_logprobs", "values"}
    assert made.min_group_size in (1, 2)
    assert made.learns_from_equal_scores(1.0) in (True, False)
    assert isinstance(made, AdvantageEstimator)
    assert made.rewards is not None  # all built-in ones charge costs


@EACH
def test_each_gives_every_sampled_token_an_advantage_and_leaves_its_input_alone(
    name: str, step: Step, rollout: Make
) -> None:
    given = batch(step, rollout)
    before = [[s.model_dump() for s in r.scored.steps] for r in given]
    found = ESTIMATORS[name]()(given).rollouts
    assert [r.annotated for r in found] == given
    for r in found:
        assert [len(a) for a in r.advantages] == [2, 0, 1]
        assert all(a.dtype == np.float32 and np.isfinite(a).all() for a in r.advantages)
        assert all(s.advantage is not None and np.isfinite(s.advantage) for s in r.steps)
    assert [[s.model_dump() for s in r.scored.steps] for r in given] == before


@EACH
def test_none_makes_a_better_rollout_worse(name: str, step: Step, rollout: Make) -> None:
    found = ESTIMATORS[name]()(batch(step, rollout)).rollouts
    last = [float(r.advantages[2][0]) for r in found]
    assert last[0] > last[2] > last[1]


@EACH
def test_each_takes_an_empty_batch(name: str) -> None:
    assert ESTIMATORS[name]()([]).rollouts == []


def test_building_takes_what_an_estimator_has_and_leaves_the_rest() -> None:
    assert build_estimator("gigpo", omega=0.2, gamma=0.9, lam=0.5, norm_by_std=False) == Gigpo(omega=0.2, gamma=0.9)
    assert build_estimator("grpo", omega=0.2, norm_by_std=False) == Grpo(norm_by_std=False)
    assert build_estimator("gigpo", gamma=None) == Gigpo()
    assert build_estimator("gae", lam=0.5, omega=0.001) == Gae(lam=0.5)
    with pytest.raises(ConfigError, match=r"adv_estimator is 'gipgo'; choose one of grpo, .*; did you mean 'gigpo'?"):
        build_estimator("gipgo")


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("gigpo", {"gamma": 1.1}, "gamma is 1.1"),
        ("gigpo", {"state_anchor": "last_word"}, "state_anchor is 'last_word'"),
        ("gigpo", {"state_anchor": "no/such/file.py:room"}, "state_anchor"),
        ("gigpo", {"state_anchor": "last_messages", "anchor_messages": 0}, "anchor_messages is 0"),
        ("hgpo", {"anchor_similarity": 0.0}, "anchor_similarity is 0.0"),
        ("hgpo", {"combine": "sum"}, "combine is 'sum'"),
        ("gae", {"lam": 2.0}, "lam is 2.0"),
        ("hdpo", {"efficiency_w": -0.1}, "efficiency_w is -0.1"),
        ("pareto", {"terminal_score": "maybe"}, "terminal_score is 'maybe'"),
        ("reinforce_plus_plus", {"terminal_score": "maybe"}, "terminal_score is 'maybe'"),
    ],
)
def test_wrong_settings_are_found_before_any_rollout(name: str, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ToolwiseError, match=told):
        build_estimator(name, **wrong)


def test_importing_the_table_does_not_import_torch() -> None:
    code = "import sys, toolwise.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
