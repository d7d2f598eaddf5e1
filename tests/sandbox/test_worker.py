"""The trainer's end of a worker, against a fake worker: forged, late and incomplete messages."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolwise.sandbox import wire
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.process_tree import ProcessTree
from toolwise.sandbox.processes import Process
from toolwise.sandbox.worker import Worker


class Played:
    """A fake worker: the test writes its messages."""

    def __init__(self, scratch: Path) -> None:
        scratch.mkdir()
        ours, self.theirs = socket.socketpair()
        output, self.printer = os.pipe()
        self.life, life = os.pipe()
        words = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        nothing = subprocess.DEVNULL
        popen = subprocess.Popen(words, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
        ours.setblocking(False)
        os.set_blocking(output, False)
        self.worker = Worker(Process(ours, output, life, ProcessTree(popen, "mark"), scratch), Plan((), str(scratch)))

    def say(self, **message: Any) -> None:
        self.theirs.sendall(wire.to_frame(wire.encode(message)))

    def asked(self) -> dict[str, Any]:
        length = wire.HEADER.unpack(self.theirs.recv(4, socket.MSG_WAITALL))[0]
        return dict(json.loads(self.theirs.recv(length, socket.MSG_WAITALL)))


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    played = Played(tmp_path / "scratch")
    yield played
    played.worker.end()
    played.theirs.close()
    os.close(played.printer)
    os.close(played.life)


def _call(played: Played, timeout_s: float = 0.2) -> list[Any]:
    return list(played.worker.call({"calls": [{}]}, 1, timeout_s, time.monotonic() + timeout_s))


def _kind(played: Played) -> str:
    with pytest.raises(WorkerFault) as caught:
        _call(played)
    return caught.value.kind


def test_silence_is_a_timeout(played: Played) -> None:
    began = time.monotonic()
    assert _kind(played) == "timeout"
    assert time.monotonic() - began < 0.5


def test_a_call_too_large_to_be_taken_at_once_is_sent_by_a_trainer_with_many_open_files(played: Played) -> None:
    process = played.worker.process
    with process.channel as low:
        process.channel = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100))
    process.channel.setblocking(False)
    with pytest.raises(WorkerFault) as caught:
        played.worker._send(b"x" * (8 << 20), time.monotonic() + 0.2)
    assert caught.value.kind == "timeout"


def test_early_output_on_import_is_reported(played: Played) -> None:
    told: list[tuple[str, str]] = []
    played.worker._on_print = lambda label, text: told.append((label, text))
    os.write(played.printer, b"loaded\n")
    played.worker._drain()  # as if the code were loaded while the trainer still reads the hardening report
    played.say(signature=None)
    with pytest.raises(WorkerFault):
        played.worker.load(1.0)
    assert told == [("on import", "loaded\n")]


def test_an_answer_to_another_call_is_refused(played: Played) -> None:
    played.say(id="1", at=0, answers=[{"result": "{}"}], state_changed=False)
    assert _kind(played) == "bad_type"


def test_a_closed_channel_is_a_death(played: Played) -> None:
    played.theirs.close()
    assert _kind(played) == "died"


def test_output_without_end_does_not_delay_the_deadline(played: Played) -> None:
    os.set_blocking(played.printer, False)
    os.write(played.printer, b"x" * 60_000)
    with pytest.raises(WorkerFault) as caught:
        _call(played)
    assert caught.value.kind == "timeout"
    assert "It printed" in caught.value.traceback
    assert len(caught.value.traceback) < 40_000


def _answer_while_called(played: Played, **changes: Any) -> list[Any]:
    call = played.worker.call({"calls": [{}]}, 1, 5.0, time.monotonic() + 5.0)

    def answer() -> None:
        request = played.asked()
        said = {"id": request["id"], "at": 0, "answers": [{"result": "{}"}], "state_changed": False, **changes}
        played.say(**said)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return list(call)
    finally:
        thread.join()


def test_a_good_answer_leaves_the_worker_clean(played: Played) -> None:
    assert _answer_while_called(played) == [[{"result": "{}"}]]
    assert played.worker.clean
    assert played.worker.calls == 1


@pytest.mark.parametrize(
    "changes", [{"state_changed": True}, {"state_changed": None}, {"answers": [{"fault": {}}]}, {"answers": [5]}]
)
def test_any_other_answer_does_not(played: Played, changes: dict[str, Any]) -> None:
    _answer_while_called(played, **changes)
    assert not played.worker.clean


@pytest.mark.parametrize("changes", [{"at": 1}, {"answers": None}, {"id": []}])
def test_answers_out_of_turn_are_refused(played: Played, changes: dict[str, Any]) -> None:
    with pytest.raises(WorkerFault) as caught:
        _answer_while_called(played, **changes)
    assert caught.value.kind == "bad_type"


def test_the_folder_is_emptied_after_a_call(played: Played) -> None:
    (played.worker.process.scratch / "d").mkdir()
    (played.worker.process.scratch / "d" / "f").write_text("x")
    (played.worker.process.scratch / "link").symlink_to("/nowhere")
    _answer_while_called(played)
    assert list(played.worker.process.scratch.iterdir()) == []


def test_a_load_fault_is_raised(played: Played) -> None:
    played.say(fault={"kind": "import", "message": "no"})
    with pytest.raises(WorkerFault, match="no") as caught:
        played.worker.load(1.0)
    assert caught.value.kind == "import"


def test_an_unexpected_load_reply_is_refused(played: Played) -> None:
    played.say(mode="both")
    with pytest.raises(WorkerFault) as caught:
        played.worker.load(1.0)
    assert caught.value.kind == "bad_type"
