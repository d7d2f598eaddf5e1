"""One rollout and its group: tokens under the pointer, returns at the leaves, and from a step to its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser_cases import first_row, rollout_link, wait_until

from toolwise.training.token_records import read_tokens
from toolwise.view.rollout_store import RunStore

Open = Callable[..., Any]
Serve = Callable[..., str]


def test_pointing_at_a_token_shows_its_numbers(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    first, second = read_tokens(sample / "rollouts" / "step-000001.tokens.parquet", row["token_row"], 2)
    page = open_page(serve(sample), rollout_link("rollout", row))
    page.wait_for_selector("[data-token]")
    assert page.locator(".token-detail").count() == 0
    for strip, step, index in ((0, first, 4), (1, second, 2)):
        page.locator(".tokens").nth(strip).locator(f"[data-token='{index}']").hover()
        page.wait_for_selector(f".token-detail[data-step='{strip}'][data-index='{index}']")
        assert step.advantages is not None
        assert step.gaps is not None
        assert step.entropies is not None
        assert float(page.get_attribute("[data-advantage]", "data-advantage")) == float(step.advantages[index])
        assert float(page.get_attribute("[data-value=logprob]", "title")) == float(step.logprobs[index])
        shown = page.inner_text(".token-detail")
        assert f"entropy\t{step.entropies[index]:.3f} nats" in shown
        assert f"policy version\t{step.versions[index]}" in shown
        gap = page.locator(".token-detail tr", has_text="gap").locator("span").get_attribute("title")
        assert float(gap) == float(step.gaps[index])
    assert "token=" not in page.evaluate("location.hash")  # pointing pins nothing


def test_leaves_have_the_return_and_the_advantage_of_their_rollout(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    store = RunStore(sample)
    members = store.group("step-000001", row["group_id"])
    wanted = sorted((store.record(one).steps[0].return_to_go, one["advantage"]) for one in members)
    page = open_page(serve(sample), rollout_link("group", row))
    page.wait_for_selector(".leaf")
    leaves = "[...document.querySelectorAll('.leaf')]"
    shown = page.evaluate(
        f"{leaves}.map(e => ['return', 'advantage'].map(n => +e.querySelector(`[data-${{n}}]`).dataset[n]))"
    )
    assert sorted(map(tuple, shown)) == wanted
    assert len({returned for returned, _ in wanted}) > 1


def test_a_step_leads_to_its_state(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    store = RunStore(sample)
    anchor = store.record(row).steps[0].anchor
    same = {
        (one["rollout_id"], index): (step.return_to_go, step.advantage)
        for one in store.group("step-000001", row["group_id"])
        for index, step in enumerate(store.record(one).steps)
        if step.anchor == anchor
    }
    page = open_page(serve(sample), rollout_link("rollout", row))
    page.locator(".message.assistant a.pill").first.click()
    page.wait_for_selector("[data-anchor]")
    assert page.locator("[data-anchor]").count() == 1
    assert page.get_attribute("[data-anchor]", "data-anchor") == str(anchor)
    rows = "[...document.querySelectorAll('[data-anchor] tbody tr')].map(e => e.dataset)"
    shown = page.evaluate(f"{rows}.map(d => [d.rollout, +d.index, +d.return, +d.advantage])")
    assert {(name, index): (returned, gained) for name, index, returned, gained in shown} == same
    assert len(same) > 1
    assert page.locator("tr.on").get_attribute("data-rollout") == row["rollout_id"]
    page.locator(".tabs").get_by_text("Conversation").click()
    wait_until(page, "location.hash.startsWith('#/rollout?')")
    page.wait_for_selector(".conversation")
    assert row["rollout_id"] in page.inner_text(".crumbs")  # of the rollout it was reached from


def test_thinking_levels_have_their_tokens_score_and_advantage(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, thinking=True)
    compared = RunStore(sample).record(row).thinking
    page = open_page(serve(sample), rollout_link("thinking", row))
    page.wait_for_selector("[data-level]")
    cards = page.locator("[data-level]")
    wanted = [level for step in compared for level in step["levels"]]
    assert cards.count() == len(wanted)
    for index, level in enumerate(wanted):
        card = cards.nth(index)
        assert card.get_attribute("data-level") == str(level["level"])
        assert card.locator("[data-value=tokens]").inner_text() == str(level["tokens"])
        assert float(card.locator("[data-value=score]").get_attribute("title")) == level["action_logprob"]
        shown = float(card.locator("[data-value=advantage]").get_attribute("title"))
        assert shown == pytest.approx(level["advantage"], abs=1e-12)


def test_what_is_not_stored_says_why(sample: Path, serve: Serve, open_page: Open) -> None:
    evaluated = first_row(sample, "eval-000000", steps=1)
    unrouted = first_row(sample, "step-000001", route=None)
    page = open_page(serve(sample), rollout_link("rollout", evaluated, colour="entropies", token="0.1"))
    page.wait_for_selector("[data-token]")
    assert "not stored" in page.inner_text(".colouring")
    assert "Not trained on" in page.inner_text(".token-detail")
    for name, row, why in (
        ("anchors", evaluated, "compares whole rollouts"),
        ("thinking", evaluated, "No thinking levels were compared"),
        ("router", unrouted, "was not routed"),
    ):
        page.goto(f"{serve(sample)}{rollout_link(name, row)}")
        page.wait_for_selector("main .empty")
        wait_until(page, f"document.querySelector('main').innerText.includes({why!r})")
