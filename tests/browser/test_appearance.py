"""Every view in dark and light, on a narrow screen and by keyboard: text can be read, nothing is cut off."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser_cases import first_row, rollout_link, wait_until, wait_until_settled

Open = Callable[..., Any]
Serve = Callable[..., str]
CONTRAST = (Path(__file__).parent / "contrast.js").read_text().partition("\n")[2]


def every_view(run: Path) -> list[str]:
    row = first_row(run, "step-000002", trained_on=True, steps=2)
    links = [rollout_link(name, row, token="0.3") for name in ("group", "anchors", "router", "thinking")]
    colours = ("advantages", "logprobs", "entropies", "gaps", "clipped", "versions")
    links += [rollout_link("rollout", row, token="0.3", colour=colour) for colour in colours]
    evaluated = first_row(run, "eval-000000", steps=1)
    links += [rollout_link(name, evaluated) for name in ("rollout", "anchors", "router", "thinking")]
    compared = "#/compare?file=step-000001&other_file=step-000003&task=task-1"
    table = "#/rollouts?scatter=1&x=tokens&y=score&kind=known&fault=false&task_id=task-1"
    return [
        "#/overview",
        "#/overview?metric=time/step_s|frac_zero_std",
        "#/rollouts",
        table,
        "#/compare",
        compared,
        *links,
    ]


@pytest.mark.parametrize("dark", [True, False], ids=["dark", "light"])
def test_all_text_can_be_read(dark: bool, sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), dark=dark)
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", shade))) < 120) == dark
    faint: dict[str, list[Any]] = {}
    for route in every_view(sample):
        page.goto(f"{serve(sample)}{route}")
        page.wait_for_selector("main h1")
        wait_until_settled(page)
        measured = page.evaluate(CONTRAST)
        assert len(measured) > 10, route
        faint |= {
            f"{text} {where}": [route, contrast] for text, where, contrast, needed in measured if contrast < needed
        }
    assert faint == {}


def test_the_button_changes_the_theme(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/overview", dark=True)
    shade = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(shade)
    page.keyboard.press("t")
    page.wait_for_selector("[data-theme=light]")
    assert page.evaluate(shade) != dark


def test_nothing_is_wider_than_400_pixels(trained: Path, sample: Path, serve: Serve, open_page: Open) -> None:
    wide = "[document.documentElement.scrollWidth, document.querySelector('main').scrollWidth]"
    for address, routes in (
        (serve(sample), every_view(sample)),
        (serve(trained, sample), ["#/overview", "#/rollouts", "#/compare"]),
    ):
        page = open_page(address, width=400)
        for route in routes:
            page.goto(f"{address}{route}")
            page.wait_for_selector("main h1")
            wait_until_settled(page)
            assert max(page.evaluate(wide)) <= 400, route
    page.keyboard.press("?")
    page.wait_for_selector("[role=dialog]")
    assert max(page.evaluate(wide)) <= 400


def test_large_counts_and_long_names_fit_into_400_pixels(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/compare", width=400)

    def enlarge(route: Any) -> None:
        answer = route.fetch()
        data = answer.json()
        steps = len(data["stops"]["steps"])
        data["stops"]["reasons"] = {"repeated_invalid": [1_000_000] * steps, "prompt_too_long": [3] * steps}
        data["faults"] = {"infrastructure": 123_456}
        route.fulfill(response=answer, json=data)

    page.route("**/api/overview*", enlarge)
    page.keyboard.press("o")
    page.wait_for_selector("[data-reason=repeated_invalid]")
    wait_until_settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    inside = "[...document.querySelectorAll('.card')].every(card => card.scrollWidth <= card.clientWidth)"
    assert page.evaluate(inside)


def test_keys_lead_from_page_to_page(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/rollouts?kind=known")
    page.keyboard.press("c")
    wait_until(page, "location.hash.startsWith('#/compare')")
    page.keyboard.press("o")
    page.wait_for_selector(".run-header")
    assert page.evaluate("location.hash").startswith("#/overview")
    page.keyboard.press("u")
    wait_until(page, "location.hash === '#/overview' || location.hash.startsWith('#/compare')")
    page.go_back()
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    page.goto(f"{serve(sample)}{rollout_link('rollout', row)}")
    page.wait_for_selector("[data-token]")
    names = page.locator(".siblings a").evaluate_all(
        "all => all.map(e => new URLSearchParams(e.hash.split('?')[1]).get('id'))"
    )
    at = names.index(row["rollout_id"])
    page.keyboard.press("]")
    wait_until(page, f"new URLSearchParams(location.hash.split('?')[1]).get('id') === {names[at + 1]!r}")
    page.wait_for_selector(".conversation")
    page.keyboard.press("[")
    wait_until(page, f"new URLSearchParams(location.hash.split('?')[1]).get('id') === {names[at]!r}")
    page.wait_for_selector(".conversation")
    page.keyboard.press("u")  # as the browser's own button does
    wait_until(page, f"new URLSearchParams(location.hash.split('?')[1]).get('id') === {names[at + 1]!r}")


def test_keys_in_quick_succession_are_each_heard(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    page = open_page(serve(sample), rollout_link("rollout", row))
    page.wait_for_selector("[data-token]")
    names = page.locator(".siblings a").evaluate_all(
        "all => all.map(e => new URLSearchParams(e.hash.split('?')[1]).get('id'))"
    )
    # Nothing is painted in between, and no other event comes.
    press = """async (keys) => {
        for (const key of keys) {
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
            await null;
        }
        return new URLSearchParams(location.hash.split("?")[1]).get("id");
    }"""
    at = names.index(row["rollout_id"])
    assert page.evaluate(press, ["["] * at + ["]", "]", "[", "]", "]"]) == names[3]
    page.wait_for_selector(".conversation")
    page.evaluate(press, ["c", "o"])
    wait_until(page, "location.hash.startsWith('#/overview')")


def test_the_tab_key_goes_through_a_page_in_its_order(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/rollouts?scatter=1")
    page.wait_for_selector("tbody tr")
    page.wait_for_selector("[aria-label=kind]")
    seen: list[tuple[str, float, float]] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, x, y, outline = page.evaluate(
            """(() => {
                const one = document.activeElement, box = one.getBoundingClientRect();
                const name = one.id || one.className || one.getAttribute("aria-label") || one.textContent;
                return [name, box.left, box.top + scrollY, getComputedStyle(one).outlineStyle];
            })()"""
        )
        assert outline != "none", name  # where one is can be seen
        seen.append((name, x, y))
    names = [name for name, _, _ in seen]
    assert names[0] == "skip"
    assert names.index("search") < names.index("kind") if "kind" in names else "search" in names
    content = seen[names.index("search") :]
    rows = [y for _, _, y in content]
    assert all(later >= earlier - 40 for earlier, later in pairwise(rows))  # never back up
    page.keyboard.press("Escape")
    page.goto(f"{serve(sample)}#/overview")
    page.wait_for_selector(".run-header")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # past the menu
    assert page.evaluate("document.activeElement.id") == "main"
