"""Options are declared once, in the section of the configuration that a user writes; its consumer reads them there."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import changed, sample, tiny_model

import toolwise
from toolwise.advantages import ESTIMATORS, Gigpo, build_estimator
from toolwise.config.algorithm import AlgorithmConfig, GigpoOptions, RlvcrConfig
from toolwise.config.router import BudgetConfig, RouterConfig
from toolwise.config.schema import ActorConfig, CriticConfig, LoraConfig, RunConfig
from toolwise.config.sft import SftConfig
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.learner.loss_terms import policy_loss_terms

PACKAGE = Path(toolwise.__file__).parent
SECTIONS = (ActorConfig, CriticConfig, LoraConfig, AlgorithmConfig, RlvcrConfig, RouterConfig, BudgetConfig, SftConfig)


def dataclasses_of(room: str) -> list[Any]:
    found: list[Any] = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        module = importlib.import_module(".".join(["toolwise", *path.relative_to(PACKAGE).with_suffix("").parts]))
        found += [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
    return [kind for kind in found if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def options_of(kind: Any) -> list[Any]:
    """Fields of built-in types that the class itself declares; an estimator inherits those of its section."""
    plain = re.compile(r"(Literal\[.*\]|[a-z]\w*|None|[\[\]|., ])+")
    own = inspect.get_annotations(kind)
    return [field for field in dataclasses.fields(kind) if field.name in own and plain.fullmatch(field.type)]


@pytest.mark.parametrize("room", ["advantages", "learner", "routing", "thinking"])
def test_no_dataclass_restates_a_section_of_the_configuration(room: str) -> None:
    """Two options in common is a mirror: the next one would have to be added to it, and to what copies it. An object
    that is built from an option, such as a router's `cost`, is not one."""
    shared = {
        (kind.__name__, section.__name__): {f.name for f in options_of(kind)} & {*section.model_fields}
        for kind in dataclasses_of(room)
        for section in SECTIONS
    }
    assert {pair: names for pair, names in shared.items() if len(names) > 1} == {}


@dataclasses.dataclass(frozen=True)
class MyOptions(GigpoOptions):
    patience: int = 3
    """An option that only `MyGigpo` reads."""


class MyAlgorithmConfig(AlgorithmConfig, MyOptions):
    pass


@dataclasses.dataclass(frozen=True)
class MyGigpo(MyOptions, Gigpo):
    pass


def test_an_estimators_new_option_reaches_it_from_the_section() -> None:
    section = MyAlgorithmConfig.model_validate({"patience": 5, "omega": 0.25, "terminal_score": "never"})
    assert build_estimator(MyGigpo, **section.model_dump()) == MyGigpo(patience=5, omega=0.25, terminal_score="never")
    assert build_estimator(MyGigpo, **MyAlgorithmConfig().model_dump()) == MyGigpo()
    assert MyGigpo().gamma == 0.95


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_section_and_the_estimators_have_the_same_defaults(name: str) -> None:
    algorithm = AlgorithmConfig()
    section = algorithm.rlvcr if name == "rlvcr" else algorithm
    assert build_estimator(name, **section.model_dump()) == ESTIMATORS[name]()


class MyActorConfig(ActorConfig):
    loss_scale: float = 3.0
    """An option that only `my_loss` reads."""


class MyConfig(RunConfig):
    actor: MyActorConfig = MyActorConfig()


def test_a_new_option_needs_its_declaration_and_its_consumer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def my_loss(config: MyConfig, *arguments: Any) -> Any:
        terms = policy_loss_terms(config, *arguments)
        seen.append(config.actor.loss_scale)
        return dataclasses.replace(terms, total=config.actor.loss_scale * terms.total)

    def gradient(config: RunConfig) -> torch.Tensor:
        model = tiny_model()
        actor = Actor(model, config)
        actor.update(sample(model, [1.0, -1.0]))
        state: Any = actor.optimizer.adamw.state
        return torch.cat([state[master]["exp_avg"].flatten() for master in actor.optimizer.masters])

    options = {"max_grad_norm": 1e9, "mismatch_check": "off"}
    plain = gradient(changed(RunConfig(), **options))
    monkeypatch.setattr("toolwise.learner.actor.policy_loss_terms", my_loss)
    scaled = gradient(MyConfig.model_validate({"actor": options | {"loss_scale": 2.0}}))
    assert seen == [2.0]
    torch.testing.assert_close(scaled, 2.0 * plain)


def test_zero_and_unset_mean_what_the_settings_page_says() -> None:
    given = changed(RunConfig(), {"trainer": {"total_steps": 7}, "critic": {"value_clip": 0}}, spike_factor=0)
    actor, critic = Actor(tiny_model(), given), Critic(tiny_model(), given)
    assert (actor.optimizer.total_steps, critic.optimizer.total_steps) == (7, 7)
    assert Actor(tiny_model(), changed(given, schedule_steps=3)).optimizer.total_steps == 3
    assert (actor.adapters, actor.optimizer.guard.spike_factor, critic.optimizer.guard.spike_factor) == (None, 0, 0)
    assert RouterConfig(entropy_coef=0.4).final_entropy_coef == 0.04
    assert RouterConfig(entropy_coef=0.4, entropy_final=0.0).final_entropy_coef == 0.0


def test_one_epoch_of_one_mini_batch_is_one_step() -> None:
    assert ActorConfig().one_step
    assert not ActorConfig(ppo_epochs=2).one_step
    assert not ActorConfig(mini_batches=2).one_step
