"""`toolwise data label` from the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolwise.cli import app
from toolwise.errors import ConfigError
from toolwise.routing.labels.label_files import read_labels
from toolwise.routing.learned_router import target_of

RLLA = Path(__file__).parents[1] / "fixtures" / "rlla_test.parquet"
OPENED: list[str] = []


@pytest.fixture
def base_url() -> Iterator[str]:
    OPENED.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            OPENED.append(self.rfile.read(int(self.headers["content-length"])).decode())
            text = '{"family": "SEARCH", "router_target_action": "SEARCH-FAMILY"}'
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["data", "label", *map(str, args)])


def test_the_heuristic_writes_a_sidecar_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(RLLA.read_bytes())
    result = run(file, "--heuristic")
    assert result.exit_code == 0, result.output
    assert "labelled 80 rows" in result.output
    assert len(read_labels(tmp_path / "rows.labels.jsonl")) == 80


@pytest.mark.long
def test_a_models_answers_are_cached(tmp_path: Path, base_url: str) -> None:
    out = tmp_path / "labels.csv"
    for _ in range(2):
        result = run(RLLA, "--base-url", base_url, "--model", "m", "--out", out)
        assert result.exit_code == 0, result.output
    labels = read_labels(out)
    assert {str(label.target) for label in labels} == {"SEARCH-FAMILY"}
    assert "asked 0 questions" in result.output
    assert len(OPENED) == len(set(OPENED)) > 80


def test_parquet_has_the_data_and_the_labels(tmp_path: Path) -> None:
    from toolwise.data import load_tasks

    assert run(RLLA, "--heuristic", "--out", tmp_path / "x.parquet").exit_code == 0
    assert all(target_of(task) is not None for task in load_tasks(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([RLLA], "--heuristic"),
        ([RLLA, "--heuristic", "--out", "x.txt"], ".jsonl, .csv or .parquet"),
        ([RLLA, "--heuristic", "--out", RLLA], "never overwritten|ever overwritten"),
        ([RLLA, "--base-url", "http://x/v1", "--model", "m", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(args: list[object], said: str) -> None:
    result = run(*args)
    assert isinstance(result.exception, ConfigError)
    assert any(part in str(result.exception) for part in said.split("|"))
