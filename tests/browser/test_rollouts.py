"""The table of rollouts: its search and filters, while they are still changing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser_cases import wait_until

from toolwise.view.rollout_store import RunStore

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


def scatter_points(page: Any) -> dict[str, tuple[float, float]]:
    page.wait_for_selector(".scatter canvas")
    wait_until(page, "document.querySelector('.scatter canvas').places?.length > 0")
    points = page.evaluate("document.querySelector('.scatter canvas').places.map(([, , p]) => [p.id, p.x, p.y])")
    return {name: (x, y) for name, x, y in points}


def test_points_are_those_of_the_files_and_open_their_rollout(sample: Path, serve: Serve, open_page: Open) -> None:
    rows = [row for row in RunStore(sample).table.to_pylist() if row["file"] == "step-000001"]
    page = open_page(serve(sample), "#/rollouts?file=step-000001&scatter=1&x=tokens&y=advantage")
    assert scatter_points(page) == {row["rollout_id"]: (row["tokens"], row["advantage"]) for row in rows}
    place = page.evaluate("document.querySelector('.scatter canvas').places.map(([x, y, p]) => [x, y, p.id])[3]")
    page.locator(".scatter canvas").click(position={"x": place[0], "y": place[1]})
    page.wait_for_selector(".conversation")
    opened = next(row for row in rows if row["rollout_id"] in page.inner_text(".crumbs"))
    wanted = next(row for row in rows if row["rollout_id"] == place[2])  # points may lie on each other
    assert [opened[name] for name in ("tokens", "advantage")] == [wanted[name] for name in ("tokens", "advantage")]


def test_what_the_reward_reported_can_be_an_axis(sample: Path, serve: Serve, open_page: Open) -> None:
    store = RunStore(sample)
    page = open_page(serve(sample), "#/rollouts?file=step-000001&scatter=1&x=step&y=score")
    page.wait_for_selector("select[aria-label=y] option[value='reward/correct']", state="attached")
    page.get_by_label("y", exact=True).select_option("reward/correct")
    wait_until(page, "location.hash.includes('y=reward')")
    wait_until(
        page, "document.querySelector('.scatter canvas').getAttribute('aria-label').startsWith('reward/correct')"
    )
    rows = store.of_file("step-000001").to_pylist()
    wanted = {row["rollout_id"]: (1, float(store.record(row).metrics["correct"])) for row in rows}
    wait_until(page, f"document.querySelector('.scatter canvas').places?.length === {len(rows)}")
    assert scatter_points(page) == wanted


def test_points_are_reached_by_keyboard(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/rollouts?file=step-000001&scatter=1&x=tokens&y=score")
    points = sorted(scatter_points(page).values())
    page.locator(".scatter canvas").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    wait_until(page, f"document.querySelector('.scatter .note').textContent.includes('tokens {points[1][0]}, ')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".conversation")


def test_a_page_of_the_table_is_turned_by_keyboard(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/rollouts")
    page.wait_for_selector("tbody tr")
    total = RunStore(sample).table.num_rows
    page.keyboard.press("n")
    wait_until(page, f"document.querySelector('.pager').textContent.includes('51–{min(100, total)}')")
    page.keyboard.press("p")
    wait_until(page, "document.querySelector('.pager').textContent.includes('1–50')")
    page.keyboard.press("p")  # there is none before the first
    assert "offset" not in page.evaluate("location.hash")
