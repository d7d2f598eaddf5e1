"""A browser, runs to look at, and pages that notice every error and every request that leaves the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_cases import Training
from view_runs import sample_run

from toolwise.serve.server import Server
from toolwise.view.view_server import Pages, build_view_app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = os.environ.get("BROWSER_PATH")
    if path is None:  # the Makefile knows the names
        found = subprocess.run(["make", "-s", "browser"], cwd=ROOT, capture_output=True, text=True, check=False)
        path = found.stdout.strip()
    if not path:
        pytest.skip("no browser: apt-get install chromium, or set BROWSER_PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox needs user namespaces, which containers often lack; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_run(tmp_path_factory.mktemp("runs") / "sample")


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Training]:
    started = Training(tmp_path_factory.mktemp("training"))
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


@pytest.fixture(scope="session")
def trained(training: Training) -> Path:
    return training.finish()


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """`serve(run, …)`: the address of pages about these runs."""
    servers: dict[tuple[Path, ...], Server] = {}

    def start(*runs: Path) -> str:
        if runs not in servers:
            servers[runs] = Server(build_view_app(Pages(runs))).start()
        return f"http://127.0.0.1:{servers[runs].port}/"

    yield start
    for server in servers.values():
        server.stop()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(address, hash)`: a page; the test fails if it logs an error or asks another machine."""
    problems: list[str] = []
    contexts: list[Any] = []

    def opened(address: str, route: str = "", *, width: int = 1280, dark: bool = False, errors: bool = False) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", locale="en-US"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        if not errors:
            page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda fault: problems.append(str(fault)))
        local = address.rpartition("/")[0]
        page.on("request", lambda r: None if r.url.startswith((local, "data:")) else problems.append(r.url))
        page.on("websocket", lambda socket: problems.append(socket.url))
        page.goto(f"{address}{route}")
        page.wait_for_selector("main h1, main .empty, main .error")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
