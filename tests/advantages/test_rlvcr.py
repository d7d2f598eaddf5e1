"""RLVCR over rollouts: by hand, against a slow implementation, and its gates, targets, costs and controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rlvcr_cases import (
    ACTION,
    HEAD,
    LEVEL,
    random_batch,
    slow_advantage,
    slow_tokens,
    slow_trajectory,
    slow_utilities,
    slow_weights,
    thinking_step,
    thoughtful,
)

from toolwise.advantages import ESTIMATORS, Gigpo, Grpo, MonitoredEstimator, Rlvcr, build_estimator
from toolwise.advantages.arrays import CreditError
from toolwise.types import AnnotatedRollout, CreditedRollout

FOUR = {1: -3.0, 2: -2.0, 3: -1.0, 4: -2.0}


def pair(**kwargs: Any) -> list[AnnotatedRollout]:
    """A rollout that succeeded with level 3 and one that failed with level 1."""
    return [
        thoughtful(1.0, [thinking_step(3, FOUR)], name="won", **kwargs),
        thoughtful(0.0, [thinking_step(1, FOUR)], name="lost", **kwargs),
    ]


def tokens(credited: CreditedRollout) -> list[float]:
    return [round(float(x), 5) for a in credited.advantages for x in a]


def test_the_ungated_form_by_hand() -> None:
    plain = Rlvcr(Grpo(norm_by_std=False), thinking_diversity_w=0.0)
    won, lost = plain(pair()).rollouts
    # A_traj ±0.5; level 3 is 1 above the four's mean of −2, level 1 is 1 below it
    assert tokens(won) == [1.5] * (HEAD + 1 + ACTION)
    assert tokens(lost) == [-1.5] * (HEAD + 1 + ACTION)
    assert won.steps[0].advantage == 1.5


def test_the_signed_gate_by_hand() -> None:
    won, lost = Rlvcr(Grpo(norm_by_std=False), thinking_diversity_w=0.0, gate="signed")(pair()).rollouts
    assert tokens(won) == [1.5] * HEAD + [0.5] * (1 + ACTION)
    # The failed rollout's level was bad for its action, and the action was bad: the level is not penalized further.
    assert tokens(lost) == [0.5] * HEAD + [-0.5] * (1 + ACTION)


def test_the_gate_of_success_by_hand() -> None:
    """The failed rollout has no thinking advantage; the two that succeeded do, although neither beats the other."""
    settings: dict[str, Any] = {"thinking_diversity_w": 0.0, "gate": "success", "success_score": 1.0}
    won, lost = Rlvcr(Grpo(norm_by_std=False), **settings)(pair()).rollouts
    assert tokens(won) == [1.5] * HEAD + [0.5] * (1 + ACTION)
    assert tokens(lost) == [-0.5] * (HEAD + 1 + ACTION)
    both = [thoughtful(1.0, [thinking_step(level, FOUR)], name=f"{level}") for level in (3, 1)]
    well, badly = Rlvcr(Grpo(), **settings)(both).rollouts
    assert tokens(well) == [1.0] * HEAD + [0.0] * (1 + ACTION)
    assert tokens(badly) == [-1.0] * HEAD + [0.0] * (1 + ACTION)
    unknown = Rlvcr(Grpo(norm_by_std=False), thinking_diversity_w=0.0, gate="success")
    assert [tokens(c) for c in unknown(pair()).rollouts] == [tokens(won), tokens(lost)]
    assert [tokens(c) for c in unknown(both).rollouts] == [[0.0] * (HEAD + 1 + ACTION)] * 2


def test_the_signed_gate_goes_on_where_all_succeed_by_hand() -> None:
    """If `success_score` is set: for the level only, and not in groups where all failed."""
    settings: dict[str, Any] = {"thinking_diversity_w": 0.0, "gate": "signed", "success_score": 1.0}
    assert [tokens(c) for c in Rlvcr(Grpo(norm_by_std=False), **settings)(pair()).rollouts] == [
        [1.5] * HEAD + [0.5] * (1 + ACTION),
        [0.5] * HEAD + [-0.5] * (1 + ACTION),
    ]
    for score, wanted in ((1.0, [1.0, -1.0]), (0.0, [0.0, 0.0])):
        steps = [replace(thinking_step(level, FOUR), level_tokens=LEVEL) for level in (3, 1)]
        equals = [thoughtful(score, [step], name=f"{step.level}") for step in steps]
        found = [tokens(c) for c in Rlvcr(Grpo(), **settings)(equals).rollouts]
        assert found == [[extra] * LEVEL + [0.0] * (HEAD - LEVEL + 1 + ACTION) for extra in wanted]
        untold = Rlvcr(Grpo(), **{**settings, "success_score": None})
        assert [tokens(c) for c in untold(equals).rollouts] == [[0.0] * (HEAD + 1 + ACTION)] * 2


@pytest.mark.parametrize("what", ["priced", "gigpo"])
def test_where_all_succeed_the_sign_of_who_was_shorter_is_not_asked(what: str) -> None:
    """A_traj is not 0 there but says nothing about the actions; its sign would invert the cost."""
    tokens_of = {1: 0, 2: 2, 3: 4, 4: 8}
    alike = dict.fromkeys((1, 2, 3, 4), -1.0)
    steps = [thinking_step(level, alike, tokens=tokens_of) for level in (4, 1)]
    batch = [
        thoughtful(
            1.0, [replace(step, level_tokens=LEVEL)] * count, name=f"{step.level}", price=0.1, charged=what == "priced"
        )
        for step, count in zip(steps, (2, 1), strict=True)
    ]
    base = Gigpo(state_anchor=lambda step: "one") if what == "gigpo" else Grpo()
    settings: dict[str, Any] = {"thinking_diversity_w": 0.0, "gate": "signed", "success_score": 1.0}
    found = Rlvcr(base, **settings)(batch).rollouts
    plain = Rlvcr(base, **(settings | {"step_advantage_w": 0.0}))(batch).rollouts
    for credited, without, extra in zip(found, plain, (-0.45, 0.35), strict=True):
        for own, before in zip(credited.advantages, without.advantages, strict=True):
            assert (own - before).round(5).tolist() == pytest.approx(
                [extra] * LEVEL + [0.0] * (HEAD - LEVEL + 1 + ACTION)
            )
    assert any(abs(a[0]) > 0.1 for c in plain for a in c.advantages)  # there was a misleading sign


def test_what_rounding_leaves_of_a_mean_has_no_sign() -> None:
    """0.2 among 0.1, 0.2 and 0.3 differs from their mean by 2.8e-17."""
    batch = [thoughtful(s, [thinking_step(3, FOUR)], name=f"{s}") for s in (0.1, 0.2, 0.3)]
    _, middle, _ = Rlvcr(thinking_diversity_w=0.0, gate="signed")(batch).rollouts
    assert tokens(middle) == [0.0] * (HEAD + 1 + ACTION)


def test_the_gate_of_success_is_for_the_level_alone() -> None:
    """If the level tokens are known: the thought keeps the rollout's advantage and does not drift."""
    two = replace(thinking_step(3, FOUR), level_tokens=2)
    rollouts = [thoughtful(1.0, [two], name="a"), thoughtful(1.0, [two], name="b")]
    settings: dict[str, Any] = {"thinking_diversity_w": 0.0, "success_score": 1.0}
    for found in Rlvcr(Grpo(), gate="success", **settings)(rollouts).rollouts:
        assert tokens(found) == [1.0] * 2 + [0.0] * (HEAD - 2 + 1 + ACTION)
    for found in Rlvcr(Grpo(), gate="none", **settings)(rollouts).rollouts:
        assert tokens(found) == [1.0] * (HEAD + 1 + ACTION)


def test_rollouts_may_pay_for_their_thoughts_too() -> None:
    """4 and 0 tokens at 0.1: scores of 0.6 and 1 for advantages, 1 and 1 for the gate and everything else."""
    tokens_of = {1: 0, 2: 0, 3: 4, 4: 4}
    batch = [
        thoughtful(1.0, [thinking_step(k, FOUR, tokens=tokens_of)], name=f"{k}", price=0.1, charged=True)
        for k in (3, 1)
    ]
    settings: dict[str, Any] = {"thinking_diversity_w": 0.0, "gate": "success", "success_score": 1.0}
    dear, cheap = Rlvcr(Grpo(norm_by_std=False), **settings)(batch).rollouts
    # u: −3, −2, −1.4, −2.4, whose mean is −2.2; so A_think is 0.8 for level 3 and −0.8 for level 1
    assert tokens(dear) == [0.6] * HEAD + [-0.2] * (1 + ACTION)
    assert tokens(cheap) == [-0.6] * HEAD + [0.2] * (1 + ACTION)
    assert [c.annotated.scored.score for c in (dear, cheap)] == [1.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gate", ["none", "signed", "success"])
@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("score", ["logprob", "confidence", "neg_entropy"])
@pytest.mark.parametrize("told", [True, False])
def test_additive_and_gated_forms_equal_a_slow_twin(seed: int, gate: str, mode: str, score: str, told: bool) -> None:
    """With and without `success_score` and known level tokens."""
    batch = random_batch(seed, price=0.07, anneal=0.6, level_tokens=LEVEL if told else None)
    settings: dict[str, Any] = {"gate": gate, "mode": mode, "score": score, "step_advantage_w": 0.8}
    settings["success_score"] = 1.0 if told else None
    for found, wanted in zip(Rlvcr(**settings)(batch).rollouts, slow_tokens(batch, **settings), strict=True):
        for a, b in zip(found.advantages, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_reweighted_form_equals_a_slow_twin(seed: int) -> None:
    batch = random_batch(seed, price=0.02)
    found = Rlvcr(combine="reweight", thinking_diversity_w=0.3, importance_cap=1.5)(batch)
    by_name: dict[str, Any] = {c.rollout.rollout_id: c for c in found.rollouts}
    by_name |= {a.scored.rollout.rollout_id: a for a in found.added}
    base = slow_trajectory(batch)
    rows = 0
    for number, rollout in enumerate(batch):
        name = rollout.scored.rollout.rollout_id
        assert rollout.thinking is not None
        for index, step in enumerate(rollout.thinking.steps):
            group, own = step.group, by_name[name].advantages[index]
            weights = group and slow_weights(slow_utilities(batch, number, index, score="logprob", diversity_w=0.3))
            if not group or not weights or base[number] <= 0:
                np.testing.assert_allclose(own, base[number], atol=1e-5)
                continue
            np.testing.assert_allclose(own, weights[group.level] * base[number], rtol=1e-5)
            for score in group.scores:
                if score.alternative is None:
                    continue
                rows += 1
                row = by_name[f"{name}/step-{index}/level-{score.level}"]
                advantage = weights[score.level] * base[number]
                ratio = np.exp(score.action_logprobs.astype(float) - group.used.action_logprobs.astype(float))
                np.testing.assert_allclose(row.advantages[-1], advantage * np.minimum(ratio, 1.5), rtol=1e-5)
                if score.thinking_tokens:
                    np.testing.assert_allclose(row.advantages[0], advantage, rtol=1e-5)
    assert (len(found.rollouts), len(found.added)) == (len(batch), rows)


def test_without_a_weight_it_is_what_lies_underneath() -> None:
    batch = random_batch(3)
    for base in (Grpo(), Gigpo(state_anchor="last_observation")):
        for found, wanted in zip(Rlvcr(base, step_advantage_w=0.0)(batch).rollouts, base(batch).rollouts, strict=True):
            assert tokens(found) == tokens(wanted)


def test_gigpo_underneath_gives_each_step_its_own_sign() -> None:
    batch = pair()
    base = Gigpo(normalization="mean_norm", state_anchor="last_observation")
    under = base(batch).rollouts
    found = Rlvcr(base, gate="signed", thinking_diversity_w=0.0)(batch).rollouts
    for a, b, think in zip(found, under, (1.0, -1.0), strict=True):
        step = b.steps[0].advantage or 0.0
        assert a.advantages[0][0] == pytest.approx(step + np.sign(step) * think)
        assert a.advantages[0][-1] == pytest.approx(step)


def test_steps_without_a_group_have_no_thinking_advantage() -> None:
    batch = [
        thoughtful(1.0, [thinking_step(3), thinking_step(None), thinking_step(2, {2: -1.0, 4: -3.0})], name="a"),
        thoughtful(0.0, [thinking_step(1)], name="b"),
    ]
    base = Grpo()(batch).rollouts
    found = Rlvcr(thinking_diversity_w=0.0)(batch).rollouts
    assert tokens(found[1]) == tokens(base[1])
    assert found[0].advantages[0].tolist() == base[0].advantages[0].tolist()
    assert found[0].advantages[1].tolist() == base[0].advantages[1].tolist()
    assert found[0].advantages[2][0] == pytest.approx(base[0].advantages[2][0] + 1.0)


def test_a_batch_that_nobody_thought_over_is_its_base() -> None:
    batch = [AnnotatedRollout(r.scored) for r in pair()]
    found, metrics = Rlvcr()(batch).rollouts, Rlvcr()(batch).metrics
    assert [tokens(c) for c in found] == [tokens(c) for c in Grpo()(batch).rollouts]
    assert metrics == {}


def test_the_price_is_inside_the_four() -> None:
    same, spent = dict.fromkeys((1, 2, 3, 4), -1.0), {1: 0, 2: 2, 3: 4, 4: 6}
    batch = [
        thoughtful(1.0, [thinking_step(1, same, tokens=spent)], name="short", price=0.1),
        thoughtful(1.0, [thinking_step(4, same, tokens=spent)], name="long", price=0.1),
    ]
    short, long = Rlvcr(thinking_diversity_w=0.0)(batch).rollouts
    assert (tokens(short)[0], tokens(long)[0]) == (0.3, -0.3)


def test_diversity_lifts_what_the_group_does_not_use_and_fades() -> None:
    same = dict.fromkeys((1, 2, 3, 4), -1.0)
    for anneal, wanted in ((1.0, -0.375), (0.5, -0.1875), (0.0, 0.0)):
        batch = [thoughtful(1.0, [thinking_step(2, same)], name=n, anneal=anneal) for n in ("a", "b")]
        # All steps use level 2: it has no bonus, the three others have 0.5 each.
        assert tokens(Rlvcr()(batch).rollouts[0])[0] == pytest.approx(wanted)


def test_shuffled_advantages_are_the_same_ones_elsewhere() -> None:
    batch = random_batch(1)
    own, shuffled = Rlvcr(Grpo(), thinking_diversity_w=0.0), Rlvcr(Grpo(), thinking_diversity_w=0.0, shuffle=True)
    base = [a[0] for c in Grpo()(batch).rollouts for a in c.advantages]
    parts = [
        [a[0] - b for a, b in zip([a for c in e(batch).rollouts for a in c.advantages], base, strict=True)]
        for e in (own, shuffled)
    ]
    compared = [i for i, r in enumerate(s.group is not None for b in batch for s in b.thinking.steps) if r]
    left, right = ([part[i] for i in compared] for part in parts)
    assert left != pytest.approx(right)
    assert sorted(left) == pytest.approx(sorted(right), abs=1e-6)
    assert [tokens(c) for c in shuffled(batch).rollouts] == [tokens(c) for c in shuffled(batch).rollouts]


def test_figures_say_what_each_level_was_worth() -> None:
    metrics = Rlvcr(thinking_diversity_w=0.0)(pair()).metrics
    assert metrics["thinking/advantage_used_3"] == pytest.approx(1.0)
    assert metrics["thinking/advantage_used_1"] == pytest.approx(-1.0)
    assert metrics["thinking/advantage_level_2"] == pytest.approx(0.0)
    assert metrics["thinking/advantage"] == pytest.approx(0.0)
    assert metrics["thinking/frac_positive"] == 0.5


def test_watched_credits_as_the_other_does_and_reports_as_rlvcr() -> None:
    batch = pair()
    watched = MonitoredEstimator(Grpo())
    found = watched(batch)
    assert [tokens(c) for c in found.rollouts] == [tokens(c) for c in Grpo()(batch).rollouts]
    assert found.metrics == Rlvcr()(batch).metrics
    assert not watched.learns_from_equal_scores(1.0)


def test_equal_scores_teach_only_where_the_gate_is_open() -> None:
    assert Rlvcr().learns_from_equal_scores(0.0)
    gates: list[Any] = ["signed", "success"]
    for gate in gates:
        assert not Rlvcr(gate=gate).learns_from_equal_scores(1.0)
        assert Rlvcr(gate=gate, success_score=0.8).learns_from_equal_scores(0.8)
        assert not Rlvcr(gate=gate, success_score=0.8).learns_from_equal_scores(0.7)  # all failed: nothing to learn
    assert not Rlvcr(compare_equal_scores=False).learns_from_equal_scores(1.0)
    assert not Rlvcr(step_advantage_w=0.0).learns_from_equal_scores(1.0)
    assert not Rlvcr(combine="reweight").learns_from_equal_scores(1.0)
    assert Rlvcr(Gigpo(), gate="signed").learns_from_equal_scores(0.0)


def test_it_stands_in_the_table_and_takes_its_settings() -> None:
    assert ESTIMATORS["rlvcr"] is Rlvcr
    made: Any = build_estimator("rlvcr", gate="signed", step_advantage_w=0.3, enable=True)
    assert (made.gate, made.step_advantage_w) == ("signed", 0.3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "max"}, "mode is 'max'"),
        ({"gate": "up"}, "gate is 'up'"),
        ({"combine": "reweight", "gate": "signed"}, "leave gate"),
    ],
)
def test_settings_that_make_no_sense_are_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(CreditError, match=told):
        Rlvcr(**settings)


def test_the_slow_twin_is_not_the_fast_one_in_disguise() -> None:
    assert slow_advantage({1: -1.0, 2: -3.0}, 1, "mean_norm") == 1.0
    assert slow_advantage({1: -1.0}, 1, "mean_norm") == 0.0
