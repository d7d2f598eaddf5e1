"""A browser, runs to look at, and pages that notice every error and every request that leaves the machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest
from browser_cases import CLUSTER, LEARNERS, TURNS, Training, read_series
from view_runs import sample_run

from toolwise.serve.server import Server
from toolwise.view.view_server import Pages, build_view_app

ROOT = Path(__file__).parents[2]
TRAININGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "training": ({}, ()),
    "turns": (TURNS, ()),
    "cluster": (CLUSTER, ("--cluster", "local")),
    "learners": (LEARNERS, ("--cluster", "local")),
}
ON_RAY = ("cluster", "learners")
ORDER = {"training": 1, "turns": 1, "trained": 2, "killed": 2, "cluster": 3, "learners": 3}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a training come last, those that watch one first among them: it goes on meanwhile."""

    def order(item: pytest.Item) -> int:
        if item.path.parent != Path(__file__).parent:
            return 0
        names = getattr(item, "fixturenames", ())
        pictured = ORDER["trained"] * (item.path.name == "test_screenshots.py")  # which asks for a run when it needs it
        return max([ORDER.get(name, 0) for name in names] + [pictured])

    items.sort(key=order)


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


class Trainings:
    """The trainings that tests ask for. They start with the session, since their imports take longest; those on a
    cluster when the others have done a step and wait, since Ray waits for its processes for so long only."""

    def __init__(self, folder: Path, wanted: Collection[str]) -> None:
        self._folder = folder
        self._started: dict[str, Training] = {}
        self._ending, self._lock = Event(), Lock()
        self._starter = Thread(target=self._start, args=[[name for name in TRAININGS if name in wanted]])
        self._starter.start()

    def _start(self, wanted: Sequence[str]) -> None:
        first = [self[name] for name in wanted if name not in ON_RAY]
        for name in wanted:
            while name in ON_RAY and not all(training.has_done_a_step() for training in first):
                if self._ending.wait(0.1):
                    return
            self[name]

    def __getitem__(self, name: str) -> Training:
        with self._lock:
            if name not in self._started:
                changes, arguments = TRAININGS[name]
                self._started[name] = Training(self._folder / name, changes, *arguments)
            return self._started[name]

    def end(self) -> None:
        self._ending.set()
        self._starter.join()
        for training in self._started.values():
            training.end()


@pytest.fixture(scope="session", autouse=True)
def trainings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    started = Trainings(tmp_path_factory.mktemp("trainings"), wanted - set(ON_RAY if find_spec("ray") is None else ()))
    yield started
    started.end()


@pytest.fixture(scope="session")
def training(trainings: Trainings, chromium: Any) -> Training:
    return trainings["training"]


@pytest.fixture(scope="session")
def turns(trainings: Trainings, chromium: Any) -> Training:
    """Routes at every turn."""
    return trainings["turns"]


@pytest.fixture(scope="session")
def cluster(trainings: Trainings, chromium: Any) -> Training:
    if find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'toolwise[ray]'")
    return trainings["cluster"]


@pytest.fixture(scope="session")
def learners(trainings: Trainings, chromium: Any) -> Training:
    if find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'toolwise[ray]'")
    return trainings["learners"]


@pytest.fixture(scope="session")
def trained(training: Training) -> Path:
    return training.finish()


@pytest.fixture(scope="session")
def killed(turns: Training) -> Path:
    """A run that was killed after its second step."""
    turns.go_on(1)
    turns.wait_for("rollouts/step-000002.jsonl")
    while len(read_series(turns.out, "score/mean")) < 2:
        time.sleep(0.05)
    turns.kill()
    return turns.out


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
        asked: set[Any] = set()
        page.open_requests = asked
        page.on("request", lambda request: asked.add(request))
        page.on("requestfinished", lambda request: asked.discard(request))
        page.on("requestfailed", lambda request: asked.discard(request))
        page.on("websocket", lambda socket: problems.append(socket.url))
        page.goto(f"{address}{route}")
        page.wait_for_selector("main h1, main .empty, main .error")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
