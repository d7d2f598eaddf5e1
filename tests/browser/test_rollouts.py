"""The table of rollouts: its search and filters, while they are still changing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser_cases import wait_until

Open = Callable[..., Any]
Serve = Callable[..., str]


def test_a_search_that_has_not_begun_does_not_undo_what_came_after(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/rollouts")
    page.wait_for_selector("tbody tr")
    page.fill("#search", "845 wells")
    page.get_by_label("kind", exact=True).select_option("known")
    wait_until(page, "location.hash.includes('q=845')")
    assert "kind=known" in page.evaluate("location.hash")
    page.fill("#search", "another text")
    page.locator("tbody tr").first.click()
    page.wait_for_selector(".conversation")
    page.wait_for_timeout(400)
    assert page.locator(".conversation").count() == 1
    assert page.evaluate("location.hash").startswith("#/rollout?")


def test_clearing_the_filters_clears_text_that_is_not_searched_for_yet(
    sample: Path, serve: Serve, open_page: Open
) -> None:
    page = open_page(serve(sample), "#/rollouts?kind=known")
    page.wait_for_selector("tbody tr")
    page.fill("#search", "845")
    page.get_by_role("button", name="clear filters").click()
    page.wait_for_timeout(400)
    assert page.input_value("#search") == ""
    assert page.evaluate("location.hash") in ("#/rollouts", "#/rollouts?run=0")


def test_the_search_has_the_cursor_however_long_its_page_takes(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/overview")
    # The page hears late that it has changed, as on a busy machine.
    page.evaluate(
        """window.addEventListener("hashchange", (event) => {
            if (!event.late) {
                event.stopImmediatePropagation();
                const again = Object.assign(new HashChangeEvent("hashchange"), { late: true });
                setTimeout(() => window.dispatchEvent(again), 300);
            }
        }, { capture: true })"""
    )
    page.keyboard.press("/")
    page.wait_for_selector("#search")
    wait_until(page, "document.activeElement.id === 'search'")
    page.keyboard.type("845 wells")
    wait_until(page, "location.hash.includes('q=845+wells')")
