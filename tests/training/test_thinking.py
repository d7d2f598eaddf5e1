"""A run's thinking stage: it gets the configured settings, and the loop runs it only if enabled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from reciting import THINKING_TASKS, recite

from toolwise.advantages import Gigpo, Grpo, MonitoredEstimator, Rlvcr
from toolwise.config.loader import build_config
from toolwise.config.schema import ActorConfig, RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.actor import Actor
from toolwise.thinking.levels import DEFAULT_LEVELS
from toolwise.thinking.thinking_model import EngineModel, PolicyWithScorer
from toolwise.training.components import thinking_model
from toolwise.training.loop import annotate_and_credit, keeps_equal, train_step
from toolwise.training.run import Run, assemble, check_learnable

torch.set_num_threads(1)
DOCUMENT = {
    "adv_estimator": "rlvcr",
    "rlvcr": {"enable": True, "step_advantage_w": 1.0, "thinking_diversity_w": 0.5, "mode": "mean_norm"},
}


def by_place(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[float]:
    return [float(i % 2) for i in range(len(rollouts_messages))]


def config(**sections: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": {"device": "cpu"},
        "data": {"batch_size": 2},
        "rollout": {"n": 4, "max_new_tokens": 24, "tool_parser": "none"},
        "multi_turn": {"enable": False},
        "reward": {"sandbox": {"tier": "off"}},
        "trainer": {"total_steps": 4},
        "actor": {"lr": 1e-3},
        "algorithm": DOCUMENT,
    }
    return RunConfig.model_validate(settings | sections)


def make(**sections: Any) -> Run:
    return assemble(config(**sections), tasks=THINKING_TASKS, validation_tasks=[], reward=by_place)


def algorithm(estimator: str = "rlvcr", **rlvcr: Any) -> dict[str, Any]:
    return {"adv_estimator": estimator, "rlvcr": {"enable": True, **rlvcr}}


def test_the_documents_section_works_as_written() -> None:
    run = make()
    made: Any = run.estimator
    assert isinstance(made, Rlvcr)
    assert (made.step_advantage_w, made.thinking_diversity_w, made.mode) == (1.0, 0.5, "mean_norm")
    assert (made.gate, made.combine, made.trajectory) == ("none", "additive", Grpo())
    assert run.thinking is not None


def test_everything_else_arrives_where_it_works() -> None:
    run = make(
        algorithm=algorithm(
            gate="signed",
            score="confidence",
            base="gigpo",
            steps="mixed",
            share=0.5,
            max_added_tokens=0.7,
            max_thought_tokens=17,
            shuffle=True,
            budget={"limit": 6.0, "price": 0.01, "rate": 0.2, "proportional": 0.3, "cap": 2.0},
        )
        | {"omega": 0.25}
    )
    made: Any = run.estimator
    assert (made.gate, made.score, made.shuffle) == ("signed", "confidence", True)
    assert made.trajectory == Gigpo(omega=0.25)
    assert run.thinking is not None
    rlvcr = run.thinking.config
    assert (rlvcr.steps, rlvcr.share, rlvcr.max_added_tokens, run.thinking.total_steps) == ("mixed", 0.5, 0.7, 4)
    assert run.thinking.writer.sampling.max_new_tokens == 17
    budget = run.thinking.price.budget  # type: ignore[union-attr]
    assert (budget.limit, budget.initial, budget.rate, budget.proportional, budget.cap) == (6.0, 0.01, 0.2, 0.3, 2.0)
    assert run.thinking.writer.levels is DEFAULT_LEVELS


@pytest.mark.parametrize(
    ("settings", "teaches"),
    [({}, True), ({"steps": "mixed"}, False), ({"share": 0.0}, False), ({"gate": "signed"}, False)],
)
def test_equals_are_kept_where_they_are_compared(settings: dict[str, Any], teaches: bool) -> None:
    assert make(algorithm=algorithm(**settings)).estimator.learns_from_equal_scores(1.0) is teaches


def test_without_it_nothing_is_thought_over() -> None:
    run = make(algorithm={"adv_estimator": "grpo"})
    assert run.thinking is None
    metrics = asyncio.run(train_step(recite(run))).metrics
    assert not [name for name in metrics if name.startswith("thinking/")]


def test_a_step_of_the_loop_thinks_credits_and_learns() -> None:
    run = recite(make(algorithm=algorithm(max_thought_tokens=12)))
    turn = asyncio.run(train_step(run))
    m = turn.metrics
    assert m["thinking/format_valid"] == 0.75
    assert m["thinking/groups"] > 0
    assert m["thinking/own_gap"] < 1e-4
    assert m["thinking/added_tokens_ratio"] <= 1.0
    assert "thinking/advantage_used_1" in m or "thinking/advantage_used_3" in m
    assert m["actor/updates"] == 1.0
    again = asyncio.run(train_step(run)).metrics
    assert again["thinking/groups"] > 0


def test_under_another_estimator_it_only_measures() -> None:
    plain = recite(make(algorithm={"adv_estimator": "grpo"}))
    watched = recite(make(algorithm=algorithm("grpo", max_added_tokens=0.0)))
    assert isinstance(watched.estimator, MonitoredEstimator)
    first, second = (asyncio.run(train_step(run)) for run in (plain, watched))
    assert second.metrics["thinking/groups"] > 0
    assert "thinking/advantage" in second.metrics
    for a, b in zip(first.credited, second.credited, strict=True):
        np.testing.assert_array_equal(np.concatenate(a.advantages), np.concatenate(b.advantages))
    # Advantages sum to zero up to rounding of terms near 1, in whatever order the rollouts finished.
    assert first.metrics["actor/loss"] == pytest.approx(second.metrics["actor/loss"], abs=1e-6)


def test_reweighted_rows_reach_the_learner_and_its_canary_agrees_with_them() -> None:
    run = recite(make(algorithm=algorithm(combine="reweight", share=1.0, max_added_tokens=0.0)))
    turn = asyncio.run(train_step(run))
    assert turn.metrics["thinking/rows_added"] > 0
    assert len(turn.credited) > len({s.rollout.rollout_id for s in turn.scored})
    # The learner's log-probs match those recorded for each row's tokens, which exclude forced tokens.
    assert turn.metrics["canary/logprob_gap_max"] < 1e-3


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl": "loss", "kl_coef": 0.1}},
        {"actor": {"lr": 1e-3, "old_logprobs": "recompute", "mini_batches": 2}},
    ],
)
def test_added_rows_are_annotated_like_all_others(sections: dict[str, Any]) -> None:
    own = algorithm(combine="reweight", share=1.0, max_added_tokens=0.0) | sections.get("algorithm", {})
    turn = asyncio.run(train_step(recite(make(**sections | {"algorithm": own}))))
    assert turn.metrics["thinking/rows_added"] > 0
    assert turn.metrics["actor/updates"] == sections.get("actor", {}).get("mini_batches", 1)
    annotated = [c.annotated for c in turn.credited if "/level-" in c.rollout.rollout_id]
    assert all((a.ref_logprobs is None) != (a.old_logprobs is None) for a in annotated)


def test_the_same_cost_can_apply_to_whole_rollouts() -> None:
    sections = algorithm("grpo", share=0.0, subtract_thinking_cost=True, budget={"price": 0.1})
    run = recite(make(algorithm=sections))
    assert keeps_equal(run, 1.0)  # equal scores at different costs
    turn = asyncio.run(train_step(run))
    assert turn.metrics["thinking/added_tokens"] == 0.0
    credited = {c.rollout.rollout_offset: c for c in turn.credited if c.rollout.batch_data_id == 0}
    # The reward gave both a score of 1; the thinking cost is subtracted from the one that thought.
    assert credited[1].annotated.scored.score == credited[3].annotated.scored.score == 1.0
    assert credited[1].steps[0].advantage < credited[3].steps[0].advantage


def test_added_rows_pull_on_the_weights() -> None:
    run = recite(make(algorithm=algorithm(combine="reweight", share=1.0, max_added_tokens=0.0)))
    thought, _ = asyncio.run(_think(run))
    rollouts, deliberations = thought
    credited, *_ = annotate_and_credit(run, rollouts, deliberations)
    added = [c for c in credited if "/level-" in c.rollout.rollout_id]
    actor = Actor(run.policy.model, RunConfig(actor=ActorConfig(lr=1e-3)))
    before = [p.detach().clone() for p in actor.model.parameters()]
    actor.update(added)
    assert any(not torch.equal(a, b) for a, b in zip(before, actor.model.parameters(), strict=True))


async def _think(run: Run) -> Any:
    from toolwise.training.loop import collect

    scored, usable, _ = await collect(run)
    assert run.thinking is not None
    deliberations, metrics = await run.thinking.think(scored, usable, training_step=0)
    return (usable, deliberations), metrics


def test_the_price_moves_and_is_saved_with_the_run() -> None:
    sections = algorithm(budget={"limit": 0.5, "rate": 0.1})
    run = recite(make(algorithm=sections))
    asyncio.run(train_step(run))
    assert run.thinking is not None
    assert run.thinking.current_lambda > 0
    other = make(algorithm=sections)
    other.registry().load_state_dict(run.registry().state_dict())
    assert other.thinking is not None
    assert other.thinking.current_lambda == run.thinking.current_lambda


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"algorithm": {"adv_estimator": "rlvcr"}}, "enable is false"),
        ({"algorithm": algorithm(combine="reweight") | {"kl": "reward"}}, "no reward to subtract a KL from"),
    ],
)
def test_contradicting_settings_are_rejected(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_learnable(config(**sections))


def test_the_engine_scores_where_there_is_one_and_the_learner_where_there_is_none() -> None:
    run = make()
    assert isinstance(thinking_model(run.policy, ActorConfig()), EngineModel)
    plain = make(rollout={"n": 2, "engine": "transformers"})
    assert isinstance(thinking_model(plain.policy, ActorConfig()), PolicyWithScorer)


def test_a_misspelled_setting_is_reported() -> None:
    with pytest.raises(ConfigError, match="step_advantage_w"):
        build_config(RunConfig, {"algorithm": {"rlvcr": {"step_advantage": 1}}}, source="run.toml")
