"""The head: fp32, seeded, saved next to a model that still loads without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import tiny_model

from toolwise.errors import CheckpointError
from toolwise.routing.head.head import (
    ROUTER_METADATA_FILE,
    ROUTER_WEIGHTS_FILE,
    HeadSettings,
    RouterHead,
    load_head,
    save_head,
)

ROUTES = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")


def head(**changes: Any) -> RouterHead:
    return RouterHead(HeadSettings(**({"width": 8, "routes": ROUTES} | changes)))


def stirred(made: RouterHead) -> RouterHead:
    generator = torch.Generator().manual_seed(5)
    for weight in made.parameters():
        weight.data += torch.randn(weight.shape, generator=generator)
    return made


def test_all_routes_start_equal() -> None:
    assert head()(torch.randn(4, 8)).tolist() == [[0.0] * 3] * 4


def test_initialization_depends_on_its_seed_only() -> None:
    torch.manual_seed(1)
    first, before = head(hidden=4, seed=3), torch.get_rng_state()
    torch.manual_seed(2)
    again, other = head(hidden=4, seed=3), head(hidden=4, seed=4)
    assert first.hidden is not None
    assert again.hidden is not None
    assert other.hidden is not None
    assert torch.equal(first.hidden.weight, again.hidden.weight)
    assert not torch.equal(first.hidden.weight, other.hidden.weight)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)  # the global RNG state is unchanged


def test_scaled_inputs_have_mean_0_and_deviation_1_and_change_no_route() -> None:
    made = head(hidden=0)
    features = 5.0 * torch.randn(8, generator=torch.Generator().manual_seed(1)) + torch.randn(
        64, 8, generator=torch.Generator().manual_seed(2)
    )
    made.scale_inputs(features)
    scaled = made.norm(features)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(8), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(8), atol=1e-4, rtol=0.0)
    assert made(features).tolist() == [[0.0] * 3] * 64


def test_a_channel_that_did_not_vary_is_not_blown_up_and_equal_features_change_nothing() -> None:
    made, features = head(hidden=0), torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    made.scale_inputs(features[:1].expand(4, -1))
    assert made.norm.weight.tolist() == [1.0] * 8
    normalised = torch.nn.functional.layer_norm(features, (8,))
    made.scale_inputs(normalised * torch.tensor([*[1.0] * 7, 1e-6]))
    assert torch.isfinite(made.norm.weight).all()
    assert made.norm.weight[7] < 11.0 * made.norm.weight[:7].median()


def test_it_computes_in_fp32_under_a_trunk_in_bf16() -> None:
    made, features = stirred(head(hidden=16)), torch.randn(4, 8)
    found = made(features.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, made(features.bfloat16().float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(features), made(features.float()))


def test_values_give_logits_for_any_lambda() -> None:
    made = stirred(head(mode="value", units=("cost", "seconds"), temperature=0.5))
    found = made(torch.randn(2, 8))
    assert found.shape == (2, 3, 3)
    logits = made.logits(found, [2.0, 0.5])
    expected = (found[1, 2, 0] - 2.0 * found[1, 2, 1] - 0.5 * found[1, 2, 2]) / 0.5
    assert logits[1, 2].item() == pytest.approx(expected.item())
    assert torch.equal(made.logits(found, [0.0, 0.0]) * 0.5, found[..., 0])


def test_a_head_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    made, features = stirred(head(hidden=4, layers=(1, -1), pool="mean")), torch.randn(3, 8)
    save_head(made, tmp_path, {"cost": "calls"})
    again, told = load_head(tmp_path)
    assert again.settings == made.settings
    assert torch.equal(again(features), made(features))
    assert told["cost"] == "calls"


def test_transformers_ignores_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model()
    model.save_pretrained(tmp_path)
    save_head(head(), tmp_path)
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_folder_without_a_router_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no router .* router.enable=true"):
        load_head(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "json", "other width", "format"])
def test_a_damaged_router_is_reported_in_one_line(tmp_path: Path, damage: str) -> None:
    save_head(head(), tmp_path)
    told = json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())
    if damage == "cut":
        (tmp_path / ROUTER_WEIGHTS_FILE).write_bytes((tmp_path / ROUTER_WEIGHTS_FILE).read_bytes()[:20])
    elif damage == "json":
        (tmp_path / ROUTER_METADATA_FILE).write_text("{")
    elif damage == "other width":
        told["head"]["width"] = 9
    else:
        told["format"] = 99
    if damage in ("other width", "format"):
        (tmp_path / ROUTER_METADATA_FILE).write_text(json.dumps(told))
    with pytest.raises(CheckpointError) as error:
        load_head(tmp_path)
    assert "\n" not in str(error.value)
