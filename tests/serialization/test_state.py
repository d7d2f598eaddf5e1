"""Encoding and decoding of state is bit-exact."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import toolwise
from toolwise.training.checkpoint import latest, save


class Part:
    """The least that can be registered."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, types included."""
    if isinstance(a, torch.Tensor):
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in (a, b)]
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and flat[0] == flat[1]
    if isinstance(a, np.ndarray | np.generic):
        return isinstance(b, type(a)) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) and type(k) is type(j) for k, j in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def round_trip(folder: Path, state: Any) -> Any:
    save(folder, 1, {"part": state}, keep_last=1)
    found = latest(folder)
    assert found is not None
    return found.state()["part"]


TORCH_TYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
]
NUMPY_TYPES = [
    *("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"),
    *(">i4", ">f8", "U5", "S3", "M8[s]", "m8[ns]"),
]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(TORCH_TYPES)), draw(SHAPES)
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(b % 2 for b in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY_TYPES))), draw(SHAPES)
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype.kind == "b":
        raw = bytes(b % 2 for b in raw)
    if dtype.kind == "U":  # not every four bytes are a valid character
        raw = bytes(0 if i % 4 else b for i, b in enumerate(raw))
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


TEXT = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from(["$tensor", "$", "\ud83d\ude00"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | TEXT
    | tensors()
    | arrays()
    | arrays().filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=STATES)
def test_any_state_comes_back_to_the_last_bit(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert same(state, round_trip(tmp_path_factory.mktemp("state"), state))


def test_an_integer_of_any_size_comes_back(tmp_path: Path) -> None:
    huge = 7**20_000  # far beyond Python's limit for decimal digits
    assert round_trip(tmp_path, {"n": huge, "m": -huge}) == {"n": huge, "m": -huge}


def test_a_nan_keeps_its_payload(tmp_path: Path) -> None:
    odd = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
    assert same([odd, math.inf, -0.0], round_trip(tmp_path, [odd, math.inf, -0.0]))


def test_tied_and_overlapping_tensors_are_saved_and_come_back_apart(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"w": weight, "tied": weight, "column": weight[:, 1], "half": weight[1:], "turned": weight.T}
    back = round_trip(tmp_path, state)
    assert same(state, back)
    back["w"].zero_()
    assert same(back["tied"], weight)


def test_parameters_and_conjugates_are_saved_by_value(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    turned = torch.tensor([1 + 2j]).conj()
    back = round_trip(tmp_path, {"p": parameter, "c": turned})
    assert same(back["p"], torch.ones(2))
    assert back["c"].tolist() == [1 - 2j]


def test_an_optimizer_and_random_generators_resume_exactly(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, np.random.Generator, torch.Generator]:
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters()), np.random.default_rng(5), torch.Generator()

    def turn(model: Any, optimizer: Any, numbers: Any, generator: Any) -> torch.Tensor:
        x = torch.tensor(numbers.normal(size=(4, 3)), dtype=torch.float32)
        optimizer.zero_grad()
        (model(x) - torch.rand(4, 2, generator=generator)).square().sum().backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = make()
    turn(*first)
    model, optimizer, numbers, generator = first
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "numbers": numbers.bit_generator.state,
        "generator": generator.get_state(),
    }
    back = round_trip(tmp_path, state)
    second = make()
    second[0].load_state_dict(back["model"])
    second[1].load_state_dict(back["optimizer"])
    second[2].bit_generator.state = back["numbers"]
    second[3].set_state(back["generator"])
    assert same(turn(*first), turn(*second))


def test_tensors_lie_in_a_file_that_any_reader_opens(tmp_path: Path) -> None:
    path = save(tmp_path, 3, {"learner": {"w": torch.ones(2, dtype=torch.bfloat16)}, "data": {"at": 3}}).path
    with safe_open(path / "learner.safetensors", "pt") as file:
        assert file.get_tensor("learner.w").dtype == torch.bfloat16
    assert sorted(p.name for p in path.iterdir()) == [
        "data.json",
        "learner.json",
        "learner.safetensors",
        "manifest.json",
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"part\.a\.0: a object"),
        ({1.5: 0}, r"part\.a\.0: a key"),
        ({True: 0}, r"part\.a\.0: a key"),
        (np.array([object()]), r"part\.a\.0: an array of object"),
        (torch.ones(2, 2).to_sparse(), r"part\.a\.0: only dense"),
        (torch.ones(2, device="meta"), r"part\.a\.0: only dense"),
        (b"bytes", r"part\.a\.0: a bytes"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing_behind(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        save(tmp_path, 1, {"part": {"a": [value]}})
    assert list(tmp_path.iterdir()) == []


PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
LOADERS = {("torch", "load"), ("torch", "save"), ("torch", "package"), ("np", "load"), ("numpy", "load")}


def pickling(source: str) -> Iterator[str]:
    """What in a module's source pickles or unpickles, or could be told to."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in PICKLES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in PICKLES:
                    yield module
                yield from (f"{module}.{name.name}" for name in names if (module, name.name) in LOADERS)
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if (owner, attr) in LOADERS:
                yield f"{owner}.{attr}"
            case ast.keyword(arg="allow_pickle"):
                yield "allow_pickle"


def test_nothing_is_pickled_anywhere() -> None:
    sources = sorted(Path(toolwise.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    found = {str(path): [*pickling(path.read_text(encoding="utf-8"))] for path in sources}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "from torch import save",
        "import numpy as np; np.load('x')",
        "read('x', allow_pickle=True)",
        "from multiprocessing.connection import Client",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert [*pickling(line)] != []
    assert [*pickling("import json, torch; torch.ones(2); json.load(open('x'))")] == []
