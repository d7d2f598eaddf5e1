"""Every view in a real browser: what it shows is what the files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from browser_cases import STEPS, first_row, rollout_link, wait_until, wait_until_settled
from view_runs import HOSTILE, MEGABYTE

from toolwise.serialization.gzip_blocks import open_text
from toolwise.training.rollout_paths import rollout_files
from toolwise.training.token_records import read_tokens
from toolwise.view.rollout_query import page_of_rows
from toolwise.view.rollout_store import RunStore

Open = Callable[..., Any]
Serve = Callable[..., str]


def test_the_overview_shows_the_numbers_of_the_summary(trained: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(trained), "#/overview")
    page.wait_for_selector(".u-wrap")
    summary = json.loads((trained / "summary.json").read_bytes())
    assert page.inner_text("[data-metric=correct]") == f"{100 * summary['after']['correct']:.1f} %"
    assert page.inner_text("[data-metric=score]") == f"{summary['after']['score']:.3f}"
    titles = page.locator("figcaption").all_inner_texts()
    assert {"Score", "Correct", "Cost", "Entropy nats"} <= {title.strip() for title in titles}


def test_legends_show_the_latest_values(trained: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(trained), "#/overview")
    entry = page.locator(".chart", has_text="Entropy").locator(".u-series", has_text="entropy")
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    latest = [row["actor/entropy"] for row in rows if "actor/entropy" in row][-1]
    assert entry.locator(".u-value").inner_text() == f"{latest:.3f}"


def test_a_run_whose_process_is_gone_is_not_live(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/overview")
    assert page.locator(".run-header .status").inner_text() == "crashed"
    assert page.locator(".status.live").count() == 0


def test_a_page_that_cannot_show_its_data_leaves_the_others_alone(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/rollouts")
    page.route("**/api/overview*", lambda route: route.fulfill(json={"name": 3}))
    page.keyboard.press("o")
    page.wait_for_selector("main .error")
    assert "This page cannot be shown" in page.inner_text("main .error")
    page.keyboard.press("r")
    page.wait_for_selector("tbody tr")
    page.goto(f"{serve(sample)}#/constructor")
    page.wait_for_selector("main .error")
    assert "There is no page constructor" in page.inner_text("main .error")


def test_a_finding_leads_to_its_rollouts(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), "#/overview")
    page.locator(".finding a", has_text="rollout 1").click()
    page.wait_for_selector("[data-token]")
    assert "step-2/1/0" in page.inner_text(".crumbs")


def test_several_runs_share_an_axis(trained: Path, sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(trained, sample), "#/overview")
    scores = page.locator(".chart", has_text="Score").locator(".u-legend", has_text="short")
    scores.filter(has_text="sample").first.wait_for()  # a run's curves come when its metrics have been read
    page.locator(".chip", has_text="sample").click()
    wait_until(page, "location.hash.includes('runs=0')")


def test_the_table_filters_sorts_and_searches(trained: Path, serve: Serve, open_page: Open) -> None:
    table = RunStore(trained).table.to_pylist()
    page = open_page(serve(trained), "#/rollouts")
    page.wait_for_selector(f"[data-total='{len(table)}']")
    page.get_by_label("kind", exact=True).select_option("lookup")
    lookups = [row for row in table if row["kind"] == "lookup"]
    page.wait_for_selector(f"[data-total='{len(lookups)}']")
    page.get_by_role("button", name="cost").click()
    wait_until(page, "location.hash.includes('sort=cost')")
    wait_until_settled(page)
    costs = [float(text) for text in page.locator("tbody td:nth-child(7)").all_inner_texts()]
    assert costs == sorted((row["cost"] for row in lookups), reverse=True)[:50]
    page.fill("#search", "WELLS")
    raw = {
        json.loads(line)["rollout_id"]: line.lower()
        for file in rollout_files(trained / "rollouts", "*").values()
        for line in open_text(file)
    }
    with_wells = [row for row in lookups if b"wells" in raw[row["rollout_id"]]]
    page.wait_for_selector(f"[data-total='{len(with_wells)}']")


def test_a_link_shows_the_same_again(trained: Path, serve: Serve, open_page: Open) -> None:
    route = "#/rollouts?run=0&kind=arithmetic&correct=true&sort=tokens&desc=true&scatter=1&x=tokens&y=cost"
    page = open_page(serve(trained), route)
    page.wait_for_selector("canvas")
    assert page.get_by_label("kind", exact=True).input_value() == "arithmetic"
    assert page.get_by_label("x", exact=True).input_value() == "tokens"
    total = page.get_attribute("[data-total]", "data-total")
    wanted = [r for r in RunStore(trained).table.to_pylist() if r["kind"] == "arithmetic" and r["correct"]]
    assert total == str(len(wanted))


def test_advantages_are_parts_that_add_up(trained: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(trained, "step-000002", trained_on=True, steps=2)
    page = open_page(serve(trained), rollout_link("rollout", row, token="0.3"))
    page.wait_for_selector(".token-detail")
    stored = read_tokens(trained / "rollouts" / "step-000002.tokens.parquet", row["token_row"], 1)[0]
    parts = page.evaluate("[...document.querySelectorAll('[data-part]')].map(e => [e.dataset.part, +e.dataset.value])")
    factors = page.evaluate("[...document.querySelectorAll('[data-factor]')].map(e => +e.dataset.value)")
    used = float(page.get_attribute("[data-advantage]", "data-advantage"))
    assert stored.advantages is not None
    assert used == pytest.approx(float(stored.advantages[3]), abs=1e-9)
    assert dict(parts) == {name: float(values[3]) for name, values in stored.parts.items()}
    total = sum(value for _, value in parts)
    for factor in factors:
        total *= factor
    assert total == pytest.approx(used, abs=1e-6)
    logprob = page.get_attribute("[data-value=logprob]", "title")
    assert float(logprob) == pytest.approx(float(stored.logprobs[3]), abs=1e-9)


@pytest.mark.parametrize("colour", ["advantages", "logprobs", "entropies", "gaps", "clipped", "versions"])
def test_tokens_are_coloured(sample: Path, serve: Serve, open_page: Open, colour: str) -> None:
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    tokens = read_tokens(sample / "rollouts" / "step-000001.tokens.parquet", row["token_row"], 2)
    page = open_page(serve(sample), rollout_link("rollout", row, colour=colour))
    page.wait_for_selector("[data-token]")
    shown = page.evaluate("[...document.querySelectorAll('[data-token]')].map(e => e.style.background !== '')")
    values = [value for step in tokens for value in getattr(step, colour).tolist()]
    assert len(shown) == len(values)
    assert any(shown)
    if colour == "clipped":
        assert shown == [bool(value) for value in values]


def test_tokens_spell_what_was_sampled(trained: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(trained, "step-000001", trained_on=True, stop_reason="answered")
    page = open_page(serve(trained), rollout_link("rollout", row))
    page.wait_for_selector("[data-token]")
    said = page.locator(".message.assistant .text:not(.mono)").last.inner_text()
    strip = page.locator(".tokens").last.inner_text()
    assert said.strip() in strip


def test_the_group_is_a_tree_with_every_rollout_once(trained: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(trained, "step-000001", kind="two_step")
    group = RunStore(trained).group("step-000001", row["group_id"])
    page = open_page(serve(trained), rollout_link("group", row))
    page.wait_for_selector(".leaf")
    assert page.locator(".leaf").count() == len(group) == 4
    assert page.locator(".line.user").count() == 1
    scores = sorted(float(text.replace("−", "-")) for text in page.locator(".leaf b").all_inner_texts())
    assert scores == pytest.approx(sorted(one["score"] for one in group), abs=5e-4)


def test_steps_of_one_state_are_together(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, steps=2)
    store = RunStore(sample)
    states: dict[int, int] = {}
    for member in store.group("step-000001", row["group_id"]):
        for step in store.record(member).steps:
            states[step.anchor or 0] = states.get(step.anchor or 0, 0) + 1
    page = open_page(serve(sample), rollout_link("anchors", row))
    page.wait_for_selector("[data-anchor]")
    cards = "[...document.querySelectorAll('[data-anchor]')]"
    shown = page.evaluate(f"{cards}.map(e => [+e.dataset.anchor, e.querySelectorAll('tbody tr').length])")
    assert dict(map(tuple, shown)) == states
    assert page.locator(".pill.warn", has_text="met once").count() == sum(count == 1 for count in states.values()) > 0


def test_the_route_shows_its_odds(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", route="SEARCH-FAMILY")
    record = RunStore(sample).record(row)
    page = open_page(serve(sample), rollout_link("router", row))
    page.wait_for_selector("[data-route]")
    rows = "[...document.querySelectorAll('[data-route]')]"
    odds = dict(page.evaluate(f"{rows}.map(e => [e.dataset.route, +e.querySelector('[data-p]').dataset.p])"))
    assert set(odds) == {"ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"}
    assert sum(odds.values()) == pytest.approx(1.0)
    assert record.router_log_prob is not None
    assert odds["SEARCH-FAMILY"] == pytest.approx(2.718281828**record.router_log_prob, abs=1e-6)
    assert "λ over time" in page.inner_text("main")


def test_thinking_levels_are_side_by_side(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, thinking=True)
    thinking = RunStore(sample).record(row).thinking
    page = open_page(serve(sample), rollout_link("thinking", row))
    page.wait_for_selector("[data-level]")
    assert page.locator("[data-level]").count() == 4 * len(thinking)
    assert page.locator(".level.used").count() == len(thinking)
    assert all("no thought" in text for text in page.locator("[data-level='1']").all_inner_texts())
    unused = next(level for level in thinking[0]["levels"] if level["thought"])
    assert unused["thought"] in page.locator(f"[data-level='{unused['level']}']").first.inner_text()


def test_a_level_that_failed_is_named(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000001", trained_on=True, thinking=True)
    page = open_page(serve(sample), "#/rollouts")

    def leave_out(route: Any) -> None:
        answer = route.fetch()
        data = answer.json()
        for step in data["thinking"]:
            step["levels"] = [level for level in step["levels"] if level["level"] in (2, step["level"])]
        route.fulfill(response=answer, json=data)

    page.route("**/api/rollout?*", leave_out)
    page.goto(f"{serve(sample)}{rollout_link('thinking', row)}")
    page.wait_for_selector("[data-missing='3']")
    assert "could not be used" in page.inner_text("[data-missing='3']")
    assert page.locator("[data-level], [data-missing]").count() % 4 == 0


def test_two_validations_are_compared_task_by_task(trained: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(trained), f"#/compare?run=0&file=eval-000000&other_run=0&other_file=eval-{STEPS:06d}")
    page.wait_for_selector(".conversation")
    files = rollout_files(trained / "rollouts", "eval-*")
    before, after = (
        {row["task_id"]: row for row in map(json.loads, open_text(files[name]))}
        for name in ("eval-000000", f"eval-{STEPS:06d}")
    )
    flipped = [t for t in before if before[t]["metrics"]["correct"] < after[t]["metrics"]["correct"]]
    counts = page.locator("[data-outcome=learned] b")
    assert (int(counts.inner_text()) if counts.count() else 0) == len(flipped)
    wait_until(page, "document.querySelectorAll('.sides section').length === 2")


def test_the_keyboard_reaches_everything(trained: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(trained), "#/overview")
    page.keyboard.press("r")
    page.wait_for_selector("tbody tr")
    page.keyboard.press("/")
    wait_until(page, "document.activeElement.id === 'search'")
    page.keyboard.press("Escape")
    for key in ("j", "j", "k"):
        page.keyboard.press(key)
    page.wait_for_selector("tbody tr:nth-child(1).cursor")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-token]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-token='0'].current")
    page.keyboard.press("ArrowRight")
    wait_until(page, "location.hash.includes('token=0.1')")
    page.keyboard.press("2")
    wait_until(page, "location.hash.includes('colour=logprobs')")
    page.keyboard.press("?")
    page.wait_for_selector("[role=dialog]")
    page.keyboard.press("Escape")
    page.wait_for_selector("[role=dialog]", state="detached")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_hostile_text_is_shown_as_text(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000002", group_id="step-2/0", steps=2)
    pages = ["#/overview", "#/rollouts?file=step-000002", "#/rollouts?q=%3Cscript%3E"]
    pages += [rollout_link(name, row, token="0.1") for name in ("rollout", "group", "anchors", "router", "thinking")]
    pages += ["#/compare?file=step-000002&other_file=step-000002&task=task-0"]
    page = open_page(serve(sample))
    for route in pages:
        page.goto(f"{serve(sample)}{route}")
        page.wait_for_selector("main h1")
        wait_until_settled(page)
        assert page.evaluate("window.hacked") is None, route
        assert page.locator("main img, main script, main a[href^='javascript']").count() == 0, route
        assert "<script>" in page.inner_text("main"), route
        assert "\u202e" not in page.inner_text("main"), route
    page.goto(f"{serve(sample)}{pages[3]}")
    page.wait_for_selector(".code-point")
    assert {"U+202E", "U+200B", "U+001B"} <= set(page.locator(".code-point").all_inner_texts())


def test_a_megabyte_is_shown_on_demand(sample: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(sample, "step-000002", rollout_id="step-2/0/1")
    page = open_page(serve(sample), rollout_link("rollout", row))
    button = page.get_by_role("button", name="show all")
    assert len(page.locator(".message.assistant .text").last.inner_text()) < 25_000
    button.click()
    wait_until(page, f"[...document.querySelectorAll('.text')].some(e => e.textContent.length > {len(MEGABYTE)})")
    assert page.evaluate("window.hacked") is None


def test_every_answer_has_a_strict_policy(sample: Path, serve: Serve) -> None:
    address = serve(sample)
    for path in ("", "api/runs", "js/app.js", "api/nothing", "missing"):
        answer = httpx.get(f"{address}{path}")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_inline_script_would_not_run(sample: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(sample), errors=True)
    add = "document.body.append(e)"
    page.evaluate(f"const e = document.createElement('script'); e.textContent = 'window.hacked = 1'; {add}")
    page.evaluate(f"const e = document.createElement('p'); e.innerHTML = '<img src=x onerror=window.hacked=1>'; {add}")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None


def test_a_bundle_works_without_a_server(sample: Path, tmp_path: Path, open_page: Open) -> None:
    from toolwise.view.static_bundle import write_bundle

    address = write_bundle([sample], tmp_path / "bundle").as_uri()
    row = first_row(sample, "step-000002", group_id="step-2/0", steps=2)
    page = open_page(address, "#/overview")
    page.wait_for_selector(".u-wrap")
    wanted = RunStore(sample).table.to_pylist()
    page.goto(f"{address}#/rollouts?kind=lookup&sort=score&desc=true")
    page.wait_for_selector(f"[data-total='{sum(r['kind'] == 'lookup' for r in wanted)}']")
    page.fill("#search", "OSPREY 4")
    page.wait_for_selector(f"[data-total='{sum(r['kind'] == 'lookup' and r['task_id'] == 'task-3' for r in wanted)}']")
    for text in ("role", "score", 'hacked = 1"', "\u202e", "845 wells"):  # as many as the server finds
        page.goto(f"{address}#/rollouts?q={quote(text)}")
        total = page_of_rows(RunStore(sample), {"q": text})["total"]
        page.wait_for_selector(f"[data-total='{total}']")
    for name, selector in (
        ("rollout", "[data-advantage]"),
        ("group", ".leaf"),
        ("anchors", "[data-anchor]"),
        ("router", "[data-route]"),
        ("thinking", "[data-level]"),
    ):
        page.goto(f"{address}{rollout_link(name, row, token='0.1')}")
        page.wait_for_selector(selector)
        assert HOSTILE[:20] in page.inner_text("main")
    page.goto(f"{address}#/compare")
    page.wait_for_selector(".conversation")
    assert page.evaluate("window.hacked") is None
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "rows.js").write_text("window.hacked = 1")
    page.goto(f"{address}#/rollouts?run=../../evil")
    page.wait_for_selector("main .error")
    assert page.evaluate("window.hacked") is None
