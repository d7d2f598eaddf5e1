"""`toolwise view`: a server for the pages about runs, on the loopback interface only.

The pages are static files; their data is JSON, read from the run folders for each request. Nothing can be changed
through it: every request is a GET.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import mimetypes
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from toolwise.errors import ConfigError, MissingExtraError, ToolwiseError
from toolwise.serialization.json_text import json_text, valid_text
from toolwise.serve.guard import LOOPBACK, RequestGuard
from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import BadRequestError
from toolwise.serve.server import listen, uvicorn_config
from toolwise.untrusted.bounds import truncate_text
from toolwise.view.compare_page import compare_page
from toolwise.view.group_page import anchor_page, group_page
from toolwise.view.overview_page import overview_page, series
from toolwise.view.rollout_page import message_text, rollout_page
from toolwise.view.rollout_query import facets, page_of_rows, points
from toolwise.view.rollout_store import NotFoundError, RunStore
from toolwise.view.router_page import router_page

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Parameters = Mapping[str, str]
log = logging.getLogger("toolwise.view")


class Pages:
    """The data of every page. One request at a time: the stores are not thread-safe, and there is one reader."""

    def __init__(self, runs: Sequence[Path | RunStore]) -> None:
        self.stores = [run if isinstance(run, RunStore) else RunStore(run) for run in runs]
        self._lock = RLock()
        self.endpoints: dict[str, Callable[[Parameters], Any]] = {
            "runs": self.runs,
            "overview": lambda p: overview_page(self.store(p)),
            "series": lambda p: series(self.store(p), p.get("names", "").split("|")),
            "facets": lambda p: facets(self.store(p)),
            "rollouts": lambda p: page_of_rows(self.store(p), p),
            "points": lambda p: points(self.store(p), p),
            "rollout": lambda p: rollout_page(self.store(p), p.get("file", ""), p.get("id", "")),
            "message": lambda p: message_text(
                self.store(p), p.get("file", ""), p.get("id", ""), _number(p.get("index"))
            ),
            "router": lambda p: router_page(self.store(p), p.get("file", ""), p.get("id", "")),
            "group": lambda p: group_page(self.store(p), p.get("file", ""), p.get("group", "")),
            "anchors": lambda p: anchor_page(self.store(p), p.get("file", ""), p.get("group", "")),
            "compare": lambda p: compare_page(
                self.store(p), p.get("file", ""), self.store(p, "other_run"), p.get("other_file", "")
            ),
        }

    def store(self, parameters: Parameters, name: str = "run") -> RunStore:
        number = _number(parameters.get(name, "0"))
        if not 0 <= number < len(self.stores):
            raise NotFoundError(f"there is no run {number}; there are {len(self.stores)}")
        return self.stores[number]

    def runs(self, parameters: Parameters) -> list[dict[str, Any]]:
        """The runs as they are now; looks for new files."""
        found = []
        for number, store in enumerate(self.stores):
            store.refresh()
            state = store.state()
            steps = [file["step"] for file in store.files()]
            found.append(
                {
                    "run": number,
                    "name": store.name,
                    "signature": store.signature,
                    "rollouts": store.table.num_rows,
                    "step": max(steps, default=0),
                    "state": state,
                    "ended": state != "running",
                }
            )
        return found

    def answer(self, name: str, parameters: Parameters) -> tuple[int, Any]:
        """Status and data."""
        parameters = {key: valid_text(value) for key, value in parameters.items()}
        endpoint = self.endpoints.get(name)
        if endpoint is None:
            return 404, {"error": f"there is no page {name!r:.40}"}
        try:
            with self._lock:
                return 200, endpoint(parameters)
        except NotFoundError as fault:
            return 404, {"error": str(fault)}
        except ToolwiseError as fault:
            return 400, {"error": str(fault)}
        except FileNotFoundError as fault:
            return 404, {"error": f"{fault.filename}: no longer there; load the page again"}
        except Exception as fault:  # a damaged file may hold anything, and must not take the other pages along
            log.exception("the page %s", name)
            return 500, {"error": f"this page cannot be shown: {truncate_text(repr(fault), 300)}"}


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 10 else -1


def build_view_app(pages: Pages, host: str = "127.0.0.1") -> Any:
    """The ASGI application: GET only, by a name of this machine only, such as the address `host` it listens on."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import Response
        from starlette.routing import Route
    except ModuleNotFoundError as missing:
        raise MissingExtraError("starlette", "view") from missing

    async def data(request: Request) -> Response:
        parameters = dict(request.query_params)
        status, value = await run_in_threadpool(pages.answer, request.path_params["name"], parameters)
        return Response(json_text(value), status, HEADERS, "application/json")

    async def file(request: Request) -> Response:
        path = static_file(request.path_params.get("path") or "index.html")
        if path is None:
            return Response("not found", 404, HEADERS, "text/plain")
        return Response(path.read_bytes(), 200, HEADERS, mimetypes.guess_type(path.name)[0] or "text/plain")

    def refuse(fault: BadRequestError) -> Any:
        return Response(json_text({"error": str(fault)}), fault.status, HEADERS, "application/json")

    routes = [
        Route("/api/{name}", data, methods=["GET"]),
        Route("/", file, methods=["GET"]),
        Route("/{path:path}", file, methods=["GET"]),
    ]
    hosts = frozenset({*LOOPBACK, _in_url(host)})
    hint = "open the address that toolwise view printed; from another machine, through ssh -L"
    return RequestGuard(Starlette(routes=routes), refuse, hosts, ServerLimits(), hint=hint)


def load_arrow() -> None:
    """Load pyarrow so that it never imports pandas, as it does at the first filter where pandas is installed: that
    takes half a second and 47 MB, and nothing here uses it."""

    class NoPandas(MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "pandas":
                raise ModuleNotFoundError("not needed", name=name)

    finder = NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.scalar(0)  # it tries once
    finally:
        sys.meta_path.remove(finder)


def serve_view(runs: Sequence[Path], *, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve pages about `runs` until a signal ends it. `on_start` gets the URL."""
    if not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and the pages need no key: use 127.0.0.1, and from "
            "another machine ssh -L PORT:127.0.0.1:PORT"
        )
    load_arrow()
    app = build_view_app(Pages(runs), host)
    config = uvicorn_config(app, ServerLimits(), drain_s=1.0)
    import uvicorn

    with listen(host, port) as listening:
        on_start(f"http://{_in_url(host)}:{listening.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listening])


def _in_url(host: str) -> str:
    """An address as browsers write it in URLs and in the Host header."""
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def static_file(name: str) -> Path | None:
    """A file of the page; None if there is none of that name."""
    try:
        path = (STATIC / name).resolve()
        return path if path.is_relative_to(STATIC) and path.is_file() else None
    except (OSError, ValueError):  # too long, or with a null character
        return None
