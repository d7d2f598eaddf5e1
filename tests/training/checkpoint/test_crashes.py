"""Crashes at every point of a save, and every state that a kill or a power cut may leave on disk.

A save is recorded as a log of operations on inodes. A kill leaves the operations up to some point, the last one perhaps
half done. After a power cut only synced state is certain: a file's data after syncing the file, a name after syncing
its folder; anything else may be present, partial, zeroed or missing. Each such state is recreated in a folder, and the
real `latest`, `best` and `save` run on it.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from selection import quick_first

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import best, latest, load, save

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell which file is synced")

Tree = dict[str, Any]
"""A folder: names of files with their bytes, names of folders with their trees."""


@dataclass(frozen=True)
class Op:
    """One operation: `node` is the inode it is about, `folder` the one that holds its name."""

    kind: str
    node: int
    folder: int = -1
    name: str = ""
    data: bytes = b""
    of_folder: bool = False

    @property
    def synced_with(self) -> int:
        """The inode that must be synced before this is sure to outlast a power cut."""
        return self.node if self.kind == "write" else self.folder


class Inodes:
    """A file system in memory. Operations are by inode: each means the same whichever others were lost."""

    def __init__(self, tree: Tree) -> None:
        self.nodes: dict[int, dict[str, int] | bytes] = {}
        self._numbers = itertools.count()
        self.root = self._grow(tree)

    def _grow(self, tree: Tree | bytes) -> int:
        number = next(self._numbers)
        if isinstance(tree, dict):  # sorted, so that the same tree always gets the same numbers
            self.nodes[number] = {name: self._grow(tree[name]) for name in sorted(tree)}
        else:
            self.nodes[number] = tree
        return number

    def new(self) -> int:
        return next(self._numbers)

    def find(self, names: Sequence[str]) -> int:
        number = self.root
        for name in names:
            number = self.entries(number)[name]
        return number

    def entries(self, number: int) -> dict[str, int]:
        found = self.nodes.setdefault(number, {})
        assert isinstance(found, dict)
        return found

    def apply(self, op: Op, how: str = "whole") -> None:
        if op.kind in ("mkdir", "create"):
            self.nodes.setdefault(op.node, {} if op.of_folder else b"")
            self.entries(op.folder)[op.name] = op.node
        elif op.kind == "write":
            before = self.nodes.setdefault(op.node, b"")
            assert isinstance(before, bytes)
            parts = {"whole": op.data, "half": op.data[: len(op.data) // 2], "zeros": bytes(len(op.data))}
            self.nodes[op.node] = before + parts[how]
        elif op.kind == "rename":
            entries = self.entries(op.folder)
            for name in [name for name, node in entries.items() if node == op.node]:
                del entries[name]
            entries[op.name] = op.node
            self.nodes.setdefault(op.node, {} if op.of_folder else b"")
        elif op.kind in ("unlink", "rmdir"):
            self.entries(op.folder).pop(op.name, None)

    def tree(self, number: int | None = None) -> Tree:
        entries = self.entries(self.root if number is None else number)
        found = ((name, node, self.nodes[node]) for name, node in entries.items())
        return {name: below if isinstance(below, bytes) else self.tree(node) for name, node, below in found}


def read_tree(folder: Path) -> Tree:
    return {path.name: read_tree(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def turn_into(folder: Path, there: Tree, wanted: Tree) -> None:
    """From one tree to another by what differs: thousands of states are much alike."""
    for name, below in there.items():
        if name not in wanted and isinstance(below, dict):
            shutil.rmtree(folder / name)
        elif name not in wanted:
            (folder / name).unlink()
    for name, below in wanted.items():
        if isinstance(below, dict):
            if name not in there:
                (folder / name).mkdir()
            turn_into(folder / name, there.get(name, {}), below)
        elif there.get(name) != below:
            (folder / name).write_bytes(below)


class Recorder:
    """Does what is asked under `root`, and notes it; fails at one operation, and only once, if told to."""

    def __init__(self, root: Path, fail_at: int | None = None, fault: BaseException | None = None) -> None:
        self.root, self.fail_at, self.fault = root, fail_at, fault
        self.inodes = Inodes(read_tree(root))
        self.log: list[Op] = []
        self.failed = 0

    def note(self, op: Op, act: Callable[[], Any], torn: Callable[[], Any] = lambda: None) -> Any:
        if len(self.log) == self.fail_at and not self.failed:
            assert self.fault is not None
            self.failed += 1
            torn()
            raise self.fault
        self.log.append(op)
        self.inodes.apply(op)
        return act()

    def names(self, path: Any, dir_fd: int | None = None) -> tuple[str, ...] | None:
        """Of a path under the root, from there on; None for any other."""
        whole = Path(os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()) / os.fspath(path)
        return whole.relative_to(self.root).parts if whole.is_relative_to(self.root) else None

    def wrap(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def named(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            names = self.names(path, dir_fd)
            if names is None:
                return real(path, *args, dir_fd=dir_fd, **kwargs)
            node = self.inodes.new() if kind == "mkdir" else self.inodes.find(names)
            op = Op(kind, node, self.inodes.find(names[:-1]), names[-1], of_folder=kind != "unlink")
            return self.note(op, lambda: real(path, *args, dir_fd=dir_fd, **kwargs))

        return named

    def rename(self, source: Any, target: Any) -> None:
        old, new = self.names(source), self.names(target)
        assert old is not None
        assert new is not None
        assert old[:-1] == new[:-1], "a move to another folder is none of a checkpoint's operations"
        node = self.inodes.find(old)
        of_folder = isinstance(self.inodes.nodes[node], dict)
        op = Op("rename", node, self.inodes.find(new[:-1]), new[-1], of_folder=of_folder)
        self.note(op, lambda: REAL["rename"](source, target))

    def fsync(self, handle: int) -> None:
        names = self.names(".", handle)
        if names is not None:
            self.note(Op("sync", self.inodes.find(names)), lambda: None)

    def create(self, path: Path) -> None:
        names = self.names(path)
        assert names is not None
        op = Op("create", self.inodes.new(), self.inodes.find(names[:-1]), names[-1])
        self.note(op, lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)))

    def write(self, path: Path, data: bytes) -> None:
        names = self.names(path)
        assert names is not None

        def put(part: bytes) -> None:
            with REAL["open"](path, "r+b") as file:
                file.write(part)

        half = data[: len(data) // 2]
        self.note(Op("write", self.inodes.find(names), data=data), lambda: put(data), torn=lambda: put(half))

    def open(self, path: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *rest: Any) -> Any:
        if isinstance(path, int) or self.names(path) is None or not set(mode) & set("wax+"):
            return REAL["open"](path, mode, buffering, encoding, *rest)
        assert mode in ("w", "wb"), "a checkpoint's files are written once, from the beginning"
        self.create(Path(path))
        data = _Written(lambda found: self.write(Path(path), found))
        return data if "b" in mode else io.TextIOWrapper(data, encoding=encoding)

    def save_file(self, tensors: Any, path: Path, **kwargs: Any) -> None:
        """Which writes without Python's knowledge, and beside the file first (strace shows it)."""
        beside = path.with_name(".tmpX")
        self.create(beside)
        self.write(beside, safetensors.torch.save(tensors, **kwargs))
        self.rename(beside, path)


class _Written(io.BytesIO):
    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._write(data)


REAL: dict[str, Any] = {name: getattr(os, name) for name in ("mkdir", "unlink", "rmdir", "rename", "fsync")}
REAL |= {"open": io.open, "save_file": safetensors.torch.save_file}


@contextmanager
def recording(root: Path, fail_at: int | None = None, fault: BaseException | None = None) -> Iterator[Recorder]:
    recorder = Recorder(root, fail_at, fault)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, recorder.wrap(name, REAL[name]))
        patch.setattr(os, "rename", recorder.rename)
        patch.setattr(os, "fsync", recorder.fsync)
        patch.setattr(io, "open", recorder.open)
        patch.setattr(safetensors.torch, "save_file", recorder.save_file)
        yield recorder


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "shards").mkdir()
    (folder / "shards" / "one.bin").write_bytes(b"weights")


@dataclass(frozen=True)
class Case:
    """A folder of checkpoints, given as (step, score), and the one that is saved on top of them."""

    before: tuple[tuple[int, float], ...]
    new: tuple[int, float]
    keep_last: int
    keep_best: str = ""
    aside: int | None = None
    """A step that a crash has left without its place."""
    damaged: int | None = None
    """A step whose files are not what was saved, though as long."""
    rubbish: bool = False

    @property
    def whole(self) -> list[tuple[int, float]]:
        return [entry for entry in self.before if entry[0] != self.damaged]

    @property
    def previous(self) -> tuple[int, float] | None:
        return max(self.whole, default=None)

    def best_of(self, entries: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
        return max(entries, key=lambda entry: (entry[1], -entry[0]), default=None)

    def save(self, folder: Path, step: int, score: float, name: str) -> None:
        state = {"a": {"w": torch.full((3,), score), "name": name}, "b": {"at": step}}
        save(
            folder / "run" / "checkpoints",
            step,
            state,
            extra_files={"model": write_model},
            figures={"score": score},
            facts={"name": name},
            keep_last=self.keep_last,
            keep_best=self.keep_best,
        )

    def prepare(self, folder: Path) -> Tree:
        (folder / "run").mkdir(parents=True)
        everything = replace(self, keep_last=9)
        for step, score in self.before:
            everything.save(folder, step, score, "before")
        checkpoints = folder / "run" / "checkpoints"
        if self.aside is not None:
            (checkpoints / f"step-{self.aside:06d}").rename(checkpoints / f"step-{self.aside:06d}.old-9-x")
        if self.damaged is not None:
            (checkpoints / f"step-{self.damaged:06d}" / "b.json").write_bytes(b'{"at": 9}'[: len('{"at": 5}')])
        if self.rubbish:
            (checkpoints / "step-000002.tmp-99").mkdir()
            (checkpoints / "step-000002.tmp-99" / "half.json").write_text("{", encoding="utf-8")
        return read_tree(folder)


QUICK = ("next", "again after a crash", "the best stays", "gone back behind a damaged one")
CASES = {
    "the first": Case((), (1, 0.5), keep_last=2),
    "next": Case(((1, 0.1), (2, 0.2)), (3, 0.3), keep_last=2, rubbish=True),
    "keep one": Case(((2, 0.2),), (3, 0.3), keep_last=1),
    "again": Case(((1, 0.1), (2, 0.2), (3, 0.3)), (3, 0.4), keep_last=3),
    "the only one again": Case(((3, 0.3),), (3, 0.4), keep_last=1),
    "again after a crash": Case(((2, 0.2), (3, 0.3)), (3, 0.4), keep_last=2, aside=3),
    "the best stays": Case(((1, 0.9), (2, 0.5), (3, 0.6)), (4, 0.7), keep_last=1, keep_best="score"),
    "a new best": Case(((1, 0.9), (2, 0.5), (3, 0.6)), (4, 0.95), keep_last=2, keep_best="score"),
    "the best was left aside": Case(((1, 0.1), (3, 0.9)), (4, 0.2), keep_last=1, keep_best="score", aside=3),
    "gone back behind a damaged one": Case(((1, 0.1), (2, 0.2), (5, 0.5)), (3, 0.3), keep_last=2, damaged=5),
}


class BrokenPromiseError(AssertionError):
    """A state of the disk after which a checkpoint is lost, mixed or in the way."""


def promise(kept: bool, what: str) -> None:
    if not kept:
        raise BrokenPromiseError(what)


Entry = tuple[int, float, str]


def entry_of(path: Path) -> Entry:
    """What is in a whole checkpoint, looked at from all sides: parts of two saves would not agree. The same files under
    the same name are looked at once."""
    key = path.name, repr(read_tree(path))
    if key not in _entries:
        try:
            _entries[key] = _entry_of(path)
        except CheckpointError as fault:
            _entries[key] = fault
    found = _entries[key]
    if isinstance(found, CheckpointError):
        raise found
    return found


_entries: dict[tuple[str, str], Entry | CheckpointError] = {}


def _entry_of(path: Path) -> Entry:
    found = load(path)
    state = found.state()
    score = state["a"]["w"].tolist()[0]
    promise(found.facts["name"] == state["a"]["name"], "a mixture of two saves")
    promise(state["b"]["at"] == found.step and abs(score - found.figures["score"]) < 1e-6, "a mixture of two steps")
    promise(read_tree(path / "model") == {"config.json": b"{}", "shards": {"one.bin": b"weights"}}, "another model")
    return found.step, found.figures["score"], found.facts["name"]


@dataclass
class Checker:
    """Whether a state of the disk keeps what a checkpoint promises."""

    case: Case
    folder: Path
    seen: int = 0
    _there: Tree = field(default_factory=dict)
    _later: set[Any] = field(default_factory=set)

    def check(self, tree: Tree, *, returned: bool) -> None:
        self.seen += 1
        turn_into(self.folder, self._there, tree)
        self._there = tree
        self._look(self.folder / "run" / "checkpoints", returned=returned)
        self._go_on(self.folder)

    def _look(self, folder: Path, *, returned: bool) -> None:
        case, new = self.case, (*self.case.new, "new")
        whole: dict[str, Entry] = {}
        for path in folder.iterdir() if folder.exists() else ():
            try:
                whole[path.name] = entry_of(path)
            except CheckpointError as fault:
                mine = path.name == f"step-{case.damaged or 0:06d}" or ".tmp-" in path.name
                promise(mine, f"{path.name} bears a checkpoint's name and is not whole: {fault}")
        there = {entry for name, entry in whole.items() if ".tmp-" not in name}
        before = {(*entry, "before") for entry in case.whole}
        promise(new in there or before <= there, f"old ones went before the new one was safe: {sorted(whole)}")
        allowed = {new} | ({(*case.previous, "before")} if case.previous and not returned else set())
        found = latest(folder, warnings_out=[])
        promise(found is not None or not (case.before or returned), "there is no checkpoint left")
        promise(found is None or entry_of(found.path) in allowed, f"not the previous and not the new one: {found}")
        if case.keep_best and case.before:
            leader = best(folder, case.keep_best, warnings_out=[])
            choices = [case.best_of(case.whole), case.best_of([*case.whole, case.new])]
            promise(leader is not None and entry_of(leader.path)[:2] in choices, f"not the best: {leader}")

    def _go_on(self, folder: Path) -> None:
        """A later save works and cleans up; how is a matter of what lies there, not of what is in the rubbish."""
        checkpoints = folder / "run" / "checkpoints"
        paths = sorted(checkpoints.iterdir()) if checkpoints.exists() else []
        shape = tuple((path.name, (path / "manifest.json").exists()) for path in paths)
        if shape in self._later:
            return
        self._later.add(shape)
        (folder / "run").mkdir(exist_ok=True)
        self.case.save(folder, self.case.new[0] + 1, 0.0, "later")
        left = {path.name: entry_of(path) for path in checkpoints.iterdir()}
        promise(all("." not in name for name in left), f"rubbish was left: {sorted(left)}")
        promise(max(left.values()) == (self.case.new[0] + 1, 0.0, "later"), f"the later one is lost: {left}")
        promise(len(left) <= self.case.keep_last + bool(self.case.keep_best), f"too many were kept: {sorted(left)}")
        self._there = read_tree(folder)


def disk_states(start: Tree, log: Sequence[Op], at: int, rng: random.Random) -> Iterator[tuple[str, Tree]]:
    """What may be on the disk when all ends before operation `at`."""
    sure, pending = [], []
    for i, op in enumerate(log[:at]):
        done = any(later.kind == "sync" and later.node == op.synced_with for later in log[i + 1 : at])
        (sure if done or op.kind == "sync" else pending).append(i)

    def state(persisted: Mapping[int, str]) -> Tree:
        inodes = Inodes(start)
        for i in sorted([*sure, *persisted]):
            inodes.apply(log[i], persisted.get(i, "whole"))
        return inodes.tree()

    everything = dict.fromkeys(pending, "whole")
    yield "killed", state(everything)
    if at < len(log) and log[at].kind == "write":
        inodes = Inodes(start)
        for op in log[:at]:
            inodes.apply(op)
        inodes.apply(log[at], "half")
        yield "killed in the middle of a write", inodes.tree()
    ways = {i: ("whole", "half", "zeros") if log[i].kind == "write" else ("whole",) for i in pending}
    yield "nothing that was not synced", state({})
    for i in pending:
        yield f"all but {log[i]}", state({j: how for j, how in everything.items() if j != i})
        for how in ways[i]:
            yield f"only {log[i]}, {how}", state({i: how})
            yield f"all, but {how} of {log[i]}", state(everything | {i: how})
    choices: list[list[tuple[int, str] | None]] = [[None, *((i, how) for how in ways[i])] for i in pending]
    if len(pending) <= 3:
        subsets = [*itertools.product(*choices)]
    else:
        subsets = [tuple(rng.choice(ways) for ways in choices) for _ in range(6)]
    for subset in subsets:
        yield f"just {subset}", state(dict(chosen for chosen in subset if chosen is not None))


def examine(case: Case, start: Tree, log: Sequence[Op], folder: Path) -> int:
    """All states of all places to die; says how many different ones there were."""
    checker, rng, done = Checker(case, folder), random.Random(0), set()
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # the real disk is not under test
        for at in range(len(log) + 1):
            for how, tree in disk_states(start, log, at, rng):
                key = (repr(tree), at == len(log))
                if key in done:
                    continue
                done.add(key)
                try:
                    checker.check(tree, returned=at == len(log))
                except BrokenPromiseError as fault:
                    where = log[at] if at < len(log) else "the end"
                    raise BrokenPromiseError(f"{fault}; died before {at}: {where}; on the disk: {how}") from None
    return checker.seen


def record(case: Case, folder: Path) -> tuple[Tree, list[Op], Recorder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        start = case.prepare(folder)
    with recording(folder) as recorder:
        case.save(folder, *case.new, "new")
    return start, recorder.log, recorder


@pytest.mark.parametrize("name", quick_first(CASES, QUICK))
def test_a_save_that_dies_anywhere_leaves_a_valid_checkpoint(name: str, tmp_path: Path) -> None:
    start, log, _ = record(CASES[name], tmp_path / "disk")
    states = examine(CASES[name], start, log, tmp_path / "states")
    assert states > 2 * len(log)


@pytest.mark.long
@pytest.mark.parametrize("name", ["next", "again after a crash", "the best stays"])
def test_a_crash_while_recovering_from_a_crash_loses_nothing_either(name: str, tmp_path: Path) -> None:
    """The save after a crash is killed in its turn, wherever that may be."""
    case = CASES[name]
    start, log, _ = record(case, tmp_path / "disk")
    rng = random.Random(name)
    for number, at in enumerate(rng.sample(range(len(log)), 4)):
        *_, (_, tree) = disk_states(start, log, at, rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        turn_into(folder, {}, tree)
        found = latest(folder / "run" / "checkpoints", warnings_out=[])
        assert found is not None
        with recording(folder) as recorder:
            case.save(folder, found.step + 1, 0.0, "later")
        for place in range(len(recorder.log) + 1):
            *_, (_, left) = disk_states(tree, recorder.log, place, rng)
            again = tmp_path / f"{number}-{place}"
            again.mkdir()
            turn_into(again, {}, left)
            survivor = latest(again / "run" / "checkpoints", warnings_out=[])
            assert survivor is not None
            previous = found.step, found.figures["score"], found.facts["name"]
            assert entry_of(survivor.path) in (previous, (found.step + 1, 0.0, "later"))


@pytest.mark.parametrize("name", quick_first(CASES, QUICK))
def test_the_log_records_every_operation(name: str, tmp_path: Path) -> None:
    """Played back it gives the disk to the last byte, and the interpreter's own audit has heard of nothing else."""
    with auditing(tmp_path / "disk") as heard:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: None)
            start = CASES[name].prepare(tmp_path / "disk")
        heard.clear()
        with recording(tmp_path / "disk") as recorder:
            CASES[name].save(tmp_path / "disk", *CASES[name].new, "new")
        events = Counter(heard)
    played = Inodes(start)
    for op in recorder.log:
        played.apply(op)
    assert played.tree() == read_tree(tmp_path / "disk")
    done = Counter(op.kind for op in recorder.log)
    assert done["sync"] >= 10
    names = {"mkdir": "os.mkdir", "rename": "os.rename", "unlink": "os.remove", "rmdir": "os.rmdir"}
    assert {event: events[event] for event in names.values()} == {event: done[op] for op, event in names.items()}
    assert events["open"] == done["create"] + done["write"]
    assert set(events) <= {*names.values(), "open", "shutil.rmtree"}


_CHANGES = ("os.", "shutil.")
_READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")
_listeners: list[tuple[Path, list[str]]] = []


@contextmanager
def auditing(folder: Path) -> Iterator[list[str]]:
    """Names of the events that change something under `folder`."""
    if not _hooked:
        sys.addaudithook(_hear)  # audit hooks cannot be removed; it does nothing without listeners
        _hooked.append(True)
    heard: list[str] = []
    _listeners.append((folder, heard))
    try:
        yield heard
    finally:
        _listeners.clear()


_hooked: list[bool] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _listeners or (event != "open" and not event.startswith(_CHANGES)) or event in _READS:
        return
    folder, heard = _listeners[-1]
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        return
    dir_fd = args[-1] if event in ("os.remove", "os.rmdir") else -1
    if (isinstance(dir_fd, int) and dir_fd >= 0) or str(args[0]).startswith(str(folder)):
        heard.append(event)


FAULTS: dict[str, Callable[[], BaseException]] = {
    "an error": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "a second Ctrl-C": KeyboardInterrupt,
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", quick_first(["the first", "again", "the best stays"], ["again"]))
def test_a_failed_operation_leaves_a_valid_checkpoint(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unlike the dead, whoever hears of a fault cleans up: all of this runs for real, each operation failing once."""
    case = CASES[name]
    start, log, _ = record(case, tmp_path / "disk")
    checker = Checker(case, tmp_path / "state")
    checker.folder.mkdir()
    injected = 0
    told = Counter[str]()
    for at in range(len(log)):
        folder = tmp_path / f"at-{at}"
        folder.mkdir()
        turn_into(folder, {}, start)
        with recording(folder, at, FAULTS[kind]()) as recorder:
            try:
                case.save(folder, *case.new, "new")
                told["went on"] += 1
            except CheckpointError as fault:
                told["refused" if "\n" not in str(fault) else "refused at length"] += 1
            except KeyboardInterrupt:
                told["stopped"] += 1
        injected += recorder.failed
        checker.check(read_tree(folder), returned=False)
    assert injected == len(log)
    if kind == "an error":  # errors about old checkpoints are only warnings
        assert told["went on"] == sum("could not be removed" in line for line in caplog.messages)
        assert told["refused"] == len(log) - told["went on"] >= 26
    else:
        assert told == {"stopped": len(log)}


def position(log: Sequence[Op], kind: str, name: str) -> int:
    return next(i for i, op in enumerate(log) if op.kind == kind and (op.name == name or not name))


def never_synced(log: list[Op]) -> list[Op]:
    files = {op.node for op in log if op.kind == "create"}
    return [op for op in log if not (op.kind == "sync" and op.node in files)]


def renamed_before_the_manifest(log: list[Op]) -> list[Op]:
    begin, rename = position(log, "create", "manifest.json"), position(log, "rename", "step-000003")
    return [*log[:begin], log[rename], *log[begin:rename], *log[rename + 1 :]]


def pruned_before_it_is_durable(log: list[Op]) -> list[Op]:
    rename = position(log, "rename", "step-000003")
    return [*log[:rename], *log[rename + 2 :], *log[rename : rename + 2]]


def removed_under_its_own_name(log: list[Op]) -> list[Op]:
    rename = position(log, "rename", "step-000003")
    return [*log[: rename + 2], *(op for op in log[rename + 2 :] if op.kind not in ("rename", "sync"))]


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (never_synced, "is not whole|no checkpoint left"),
        (renamed_before_the_manifest, r"is not whole: .*manifest\.json is missing"),
        (pruned_before_it_is_durable, "old ones went before the new one was safe"),
        (removed_under_its_own_name, "is not whole"),
    ],
)
def test_a_bug_in_the_order_of_things_is_found(bug: Callable[[list[Op]], list[Op]], said: str, tmp_path: Path) -> None:
    case = CASES["keep one"]
    start, log, _ = record(case, tmp_path / "disk")
    with pytest.raises(BrokenPromiseError, match=said):
        examine(case, start, bug(log), tmp_path / "states")


@pytest.mark.parametrize("name", ["the first", "keep one"])
def test_without_any_one_of_the_syncs_a_promise_is_broken(name: str, tmp_path: Path) -> None:
    """So none is missing from the trial, and none is there for nothing."""
    start, log, _ = record(CASES[name], tmp_path / "disk")
    syncs = [i for i, op in enumerate(log) if op.kind == "sync"]
    begin = 0 if name == "the first" else syncs[-1]  # the writes are the same in both
    unneeded = []
    for i in [i for i in syncs if i >= begin]:
        try:
            examine(CASES[name], start, log[:i] + log[i + 1 :], tmp_path / f"states-{i}")
        except BrokenPromiseError:
            continue
        unneeded.append(log[i])
    assert unneeded == []
    assert len(syncs) >= 11


def test_a_save_that_forgets_to_sync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the code through the record to the verdict."""
    monkeypatch.setattr("toolwise.training.checkpoint.loader.sync", lambda path: None)
    start, log, _ = record(CASES["next"], tmp_path / "disk")
    with pytest.raises(BrokenPromiseError, match="is not whole"):
        examine(CASES["next"], start, log, tmp_path / "states")
