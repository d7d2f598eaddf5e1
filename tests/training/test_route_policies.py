"""The routes of a configuration, ready to be rolled out: notes about thinking, and who answers."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError, ModelError
from toolwise.models import load_model
from toolwise.policies.local import LimitedPolicy, LocalPolicy
from toolwise.policies.openai.policy import OpenAIAgentPolicy
from toolwise.protocols import Sampling
from toolwise.training.route_policies import build_conditioning


@pytest.fixture(scope="module")
def local() -> LocalPolicy:
    return LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=24))


def config(*routes: dict[str, Any], **router: Any) -> RunConfig:
    return RunConfig.model_validate({"router": {"routes": [{"name": "plain"}, *routes], **router}})


def test_a_thinking_level_is_asked_for_in_the_prompt(local: LocalPolicy) -> None:
    made = build_conditioning(config({"name": "deep", "thinking": 4, "note": "Take care."}), {}, local)
    text = made.wording.templates["chat", "deep", "note"]
    assert text.startswith("Take care.\nThink at level 4 (weigh): ")


def test_only_routes_that_differ_have_a_policy(local: LocalPolicy) -> None:
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "max_new_tokens": 7}
    expert = {"name": "expert", "policy": "big", "price": 1.0}
    made = build_conditioning(
        config({"name": "short", "max_new_tokens": 5}, expert, policies={"big": server}), {}, local
    )
    assert set(made.policies) == {"short", "expert"}
    short, other = made.policies["short"], made.policies["expert"]
    assert isinstance(short, LimitedPolicy)
    assert short.session(seed=0, do_sample=True).sampling.max_new_tokens == 5
    assert local.session(seed=0, do_sample=True).sampling.max_new_tokens == 24
    assert isinstance(other, OpenAIAgentPolicy)
    assert other.sampling.max_new_tokens == 7


def test_a_missing_key_is_named(local: LocalPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    given = config({"name": "expert", "policy": "big", "price": 1.0}, policies={"big": server})
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_KEY is not set"):
        build_conditioning(given, {}, local)


def test_a_stored_heads_routes_per_tool_come_back_in_its_order(local: LocalPolicy) -> None:
    given = RunConfig.model_validate({"router": {"per_tool": True}})
    made = build_conditioning(given, {}, local, names=("ANSWER", "search", "calculator"))
    assert made.routes.names == ("ANSWER", "search", "calculator")


def test_a_model_that_is_not_there_is_named_by_its_table(local: LocalPolicy) -> None:
    given = config({"name": "expert", "policy": "big", "price": 1.0}, policies={"big": {"path": "/no/such/model"}})
    with pytest.raises(ModelError, match=r"^router\.policies\.big\.path: there is no folder '/no/such/model'"):
        build_conditioning(given, {}, local)


def test_a_long_timeout_of_a_reply_is_not_cut_short(local: LocalPolicy) -> None:
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "timeout_s": 1800.0}
    expert = {"name": "expert", "policy": "big", "price": 1.0}
    policy = build_conditioning(config(expert, policies={"big": server}), {}, local).policies["expert"]
    assert isinstance(policy, OpenAIAgentPolicy)
    assert policy.endpoint.deadline_s >= 1800.0
    assert not policy.endpoint.retries_when_down
