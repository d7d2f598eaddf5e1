"""The router's learner: one forward pass per prompt, and examples that train the right weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from learner_cases import LR, changed, same, sample, tiny_model, weights
from selection import quick_first

from toolwise.config.schema import RouterConfig, RunConfig
from toolwise.errors import CheckpointError
from toolwise.learner.actor import Actor
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.learner import RouterLearner, trunk_weights
from toolwise.routing.samples import RouterExample, RouteSample

ROUTES = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")
PROMPTS = [[3, 4, 5, 6], [3, 4, 9], [7, 8], [3, 4, 5, 6, 8]]
FAST = RunConfig(
    router=RouterConfig(lr=1e-2, lr_schedule="constant", entropy_coef=0.05, entropy_final=0.05, average_last=0.0)
)

SHARED = changed(FAST, {"router": {"optimizer": "actor"}})


def router_options(total_steps: int = 100, **options: Any) -> RunConfig:
    return changed(FAST, {"router": options, "trainer": {"total_steps": total_steps}})


def learner(model: Any = None, config: RunConfig = FAST, **head: Any) -> RouterLearner:
    made = RouterHead(HeadSettings(**({"width": 32, "routes": ROUTES, "seed": 1} | head)))
    return RouterLearner(model or tiny_model(), made, config)


def strata(router: RouterLearner, best: list[int]) -> list[RouterExample]:
    """Stratified examples in which `best` has reward 1 and all other routes 0."""
    return [
        RouterExample(w, (), tuple(float(r == b) - w.probs[b] for r in range(3)))
        for w, b in zip(router.predict(PROMPTS), best, strict=True)
    ]


def best_routes(router: RouterLearner, multipliers: Sequence[float] = ()) -> list[int]:
    return [prediction.argmax() for prediction in router.predict(PROMPTS, multipliers)]


@pytest.mark.parametrize("hidden", [0, 16])
@pytest.mark.parametrize("epochs", quick_first([1, 3], [3]))
def test_it_learns_which_route_each_prompt_wants(hidden: int, epochs: int) -> None:
    router, best = learner(config=router_options(epochs=epochs), hidden=hidden), [0, 1, 2, 1]
    for _ in range(100):
        metrics = router.learn(strata(router, best))
    assert best_routes(router) == best
    assert metrics["router/updates"] == epochs


@pytest.mark.parametrize("scaled", [True, False])
def test_scaled_inputs_tell_prompts_apart_that_have_most_in_common(scaled: bool) -> None:
    router = learner(config=router_options(scale_inputs=scaled), hidden=0)
    generator = torch.Generator().manual_seed(3)
    common, difference = torch.randn(2, 32, generator=generator)
    features = [common + 0.02 * (i % 2) * difference for i in range(8)]
    for _ in range(10):
        predictions = [router.predict_encoded([3, 4], encoded) for encoded in features]
        router.learn(
            [
                RouterExample(w, (), tuple(float(r == i % 2) - w.probs[i % 2] for r in range(3)))
                for i, w in enumerate(predictions)
            ]
        )
    right = [router.predict_encoded([3, 4], features[i]).probs[i] for i in (0, 1)]
    assert (min(right) > 0.8) == scaled


def test_inputs_are_scaled_once_by_the_first_batch() -> None:
    router = learner(config=router_options(scale_inputs=True, lr=1e-9))
    router.learn(strata(router, [0, 1, 2, 1]))
    scale = router.head.norm.weight.clone()
    assert not torch.equal(scale, torch.ones(32))
    predictions = [router.predict_encoded([3], torch.full((32,), float(i))) for i in range(4)]
    router.learn([RouterExample(w, (), (0.1, 0.0, -0.1)) for w in predictions])
    torch.testing.assert_close(router.head.norm.weight, scale)


def test_scaled_inputs_need_features_that_stay() -> None:
    with pytest.raises(ValueError, match='scale_inputs needs features that stay, but backbone is "top"'):
        RouterConfig(scale_inputs=True, backbone="top")


@pytest.mark.long
def test_it_learns_from_sampled_routes_too() -> None:
    router, best = learner(), [0, 1, 2, 1]
    for step in range(300):
        weighed = router.predict(PROMPTS)
        actions = [w.sample(Random(f"{step}/{i}")) for i, w in enumerate(weighed)]
        router.learn(
            [
                RouterExample(w, (RouteSample(a, 0.0, (), advantage=float(a == b) - w.probs[b]),))
                for w, a, b in zip(weighed, actions, best, strict=True)
            ]
        )
    assert best_routes(router) == best


def test_a_frozen_trunk_is_unchanged_and_runs_once_per_prompt() -> None:
    model = tiny_model()
    before, router = weights(model), learner(model)
    passes: list[int] = []
    real = router._encode
    router.encode = lambda prompts: passes.append(len(prompts)) or real(prompts)  # type: ignore[func-returns-value]
    router.learn(strata(router, [0, 1, 2, 1]))
    assert same(weights(model), before)
    assert passes == [4]  # not again in `learn`
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(("backbone", "moved"), [("top", "layers.1."), ("full", "layers.0.")])
def test_only_the_selected_layers_are_trained(backbone: Any, moved: str) -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    router = learner(model, changed(router_options(backbone=backbone), micro_batch_tokens=16))
    router.learn(strata(router, [0, 1, 2, 1]))  # the head starts at zero: the first step does not change the trunk
    router.learn(strata(router, [0, 1, 2, 1]))
    trained = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert any(moved in name for name in trained)
    assert any("layers.0." in name for name in trained) == (backbone == "full")
    assert "lm_head.weight" not in trained
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_micro_batches_change_nothing() -> None:
    found = []
    for size in (1, 16, 16_384):
        model = tiny_model()
        router = learner(
            model,
            changed(router_options(backbone="full", entropy_coef=0.3, entropy_final=0.3), micro_batch_tokens=size),
        )
        for _ in range(3):
            figures = router.learn(strata(router, [0, 1, 2, 1]))
        found.append((figures, [*model.parameters(), *router.head.parameters()]))
    for figures, moved in found[1:]:
        assert figures["router/loss"] == pytest.approx(found[0][0]["router/loss"], abs=1e-5)
        for a, b in zip(moved, found[0][1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_the_actors_optimizer_moves_the_head_where_it_is_shared() -> None:
    model = tiny_model()
    head = RouterHead(HeadSettings(width=32, routes=ROUTES))
    actor = Actor(model, LR, extra_parameters=[*head.parameters()])
    router = RouterLearner(model, head, SHARED, actor_optimizer=actor.optimizer)
    before = weights(model)
    router.learn(strata(router, [0, 1, 2, 1]))
    assert head.out.weight.abs().max() > 0
    assert same(weights(model), before)  # weights without a gradient are unchanged
    assert "optimizer" not in router.state_dict()
    actor.update(sample(model, [1.0, -1.0]))
    assert not same(weights(model), before)


def test_an_entropy_bonus_keeps_routes_apart_from_certainty_and_can_fall() -> None:
    router = learner(config=router_options(4, entropy_coef=0.5, entropy_final=0.1))
    assert router.entropy_coef == 0.5
    for step in range(6):
        figures = router.learn(strata(router, [0, 1, 2, 1]))
        assert router.entropy_coef == pytest.approx(0.5 - 0.4 * min(1.0, (step + 1) / 4))
    assert 0 < figures["router/entropy"] < math.log(3)


def test_labels_are_learned_and_mixed_rows_ignored() -> None:
    router = learner(config=router_options(label_coef=1.0))
    for _ in range(40):
        examples = [
            RouterExample(w, (RouteSample(0, 0.0, ()),), (0.0, 0.0, 0.0), label)
            for w, label in zip(router.predict(PROMPTS), [2, None, 1, 2], strict=True)
        ]
        figures = router.learn(examples)
    actions = best_routes(router)
    assert [actions[0], *actions[2:]] == [2, 1, 2]
    assert figures["router/label_loss"] < 0.3


def test_a_warm_start_does_not_advance_the_schedule() -> None:
    router = learner(tiny_model(), router_options(2, lr_schedule="linear", entropy_final=0.0))
    for _ in range(5):
        router.supervised_step(router.predict(PROMPTS), [0, 1, 2, 1])
    assert router.entropy_coef == FAST.router.entropy_coef
    fresh = learner(tiny_model(), router_options(2, lr_schedule="linear"))
    rates = [r.learn(strata(r, [0, 1, 2, 1]))["router/lr"] for r in (router, fresh)]
    assert rates[0] == rates[1] > 0


def test_a_head_of_another_run_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    taught = learner(tiny_model(), FAST)
    taught.supervised_step(taught.predict(PROMPTS), [0, 1, 2, 1])
    taught.save(tmp_path, {"multipliers": {"cost": 0.5}})
    other = learner(tiny_model(), FAST)
    assert other.load(tmp_path)["multipliers"] == {"cost": 0.5}
    assert torch.equal(other.head.out.weight, taught.head.out.weight)
    wide = RouterLearner(tiny_model(), RouterHead(taught.head.settings.model_copy(update={"hidden": 8})), FAST)
    with pytest.raises(CheckpointError, match="has a router with a different head than the run"):
        wide.load(tmp_path)


def test_a_warm_start_learns_labels_alone() -> None:
    router = learner()
    for _ in range(40):
        router.supervised_step(router.predict(PROMPTS), [0, 1, 2, 1])
    assert best_routes(router) == [0, 1, 2, 1]


@pytest.mark.long
def test_predicted_values_give_routes_for_any_lambda() -> None:
    router = learner(mode="value", hidden=32)
    earned = [(0.1, 0.9, 0.2), (0.8, 0.9, 0.7), (0.0, 0.1, 1.0), (0.5, 0.7, 0.4)]
    paid = [(0.0, 1.0, 1.0), (0.0, 1.5, 1.0), (0.0, 2.0, 1.0), (0.0, 0.1, 1.0)]
    for _ in range(400):
        weighed = router.predict(PROMPTS, [0.0])
        figures = router.learn(
            [
                RouterExample(w, tuple(RouteSample(a, r[a], (c[a],)) for a in range(3)))
                for w, r, c in zip(weighed, earned, paid, strict=True)
            ],
            [0.0],
        )
    assert figures["router/calibration/reward"] < 0.1
    assert figures["router/calibration/cost"] < 0.15
    found = {price: best_routes(router, [price]) for price in (0, 0.5, 5)}
    assert found[0] == [1, 1, 2, 1]  # by reward alone
    assert found[0.5] == [1, 0, 2, 1]
    assert found[5] == [0, 0, 0, 0]


def test_resuming_is_bit_identical() -> None:
    router, best = learner(hidden=8), [0, 1, 2, 1]
    for _ in range(3):
        router.learn(strata(router, best))
    state, again = copy.deepcopy(router.state_dict()), learner(hidden=8, seed=9)
    again.load_state_dict(state)
    for made in (router, again):
        for _ in range(3):
            made.learn(strata(made, best))
    for a, b in zip(router.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(a, b)
    assert router.updates == again.updates == 6


def test_the_last_heads_are_averaged_into_the_saved_one(tmp_path: Path) -> None:
    config = router_options(8, average_last=0.25)
    router, best, heads = learner(config=config), [0, 1, 2, 1], []
    for step in range(8):
        router.learn(strata(router, best), [float(step)])
        heads.append(router.head.out.weight.detach().clone())
        first = router.predict(PROMPTS)[0].logprobs
        assert (router.predict(PROMPTS, averaged=True)[0].logprobs == first) == (
            step < 7
        )  # the mean of one is that one
    router.save(tmp_path, {"multipliers": {"cost": 9.0}})
    kept = learner(config=config)
    assert kept.load(tmp_path)["multipliers"] == {"cost": 6.5}  # λ of the same updates
    torch.testing.assert_close(kept.head.out.weight, (heads[6] + heads[7]) / 2)
    assert kept.predict(PROMPTS)[2].logprobs == router.predict(PROMPTS, averaged=True)[2].logprobs
    again = learner(config=router_options(100, average_last=0.25), seed=9)
    again.load_state_dict(copy.deepcopy(router.state_dict()))
    assert again.average.count == 2
    again.learn(strata(again, best), [1.0])
    assert again.average.head is None  # with more steps, averaging has not started yet


def test_a_head_of_another_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a different head"):
        learner(hidden=8).load_state_dict(learner(hidden=4).state_dict())


def test_without_examples_nothing_changes() -> None:
    router = learner()
    assert router.learn([]) == {"router/updates": 0.0}
    assert router.head.out.weight.abs().max() == 0


def test_frozen_weights_are_not_trained() -> None:
    model = tiny_model()
    model.get_decoder().layers[1].mlp.requires_grad_(False)
    assert not {id(w) for w in model.get_decoder().layers[1].mlp.parameters()} & {
        id(w) for w in trunk_weights(model, "top", 1)
    }
    assert trunk_weights(model, "frozen", 1) == []
