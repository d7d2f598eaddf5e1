"""Models by name, from a local cache laid out as a hub client lays it out; nothing is downloaded."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolwise.errors import ModelError
from toolwise.models import BUILTIN, hub, load_chat, load_model, locate

COMMITS = {"main": "1" * 40, "v1": "2" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds owner/name in two revisions, used without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for ref, commit in COMMITS.items():
        (repository / "refs" / ref).write_text(commit, encoding="utf-8")
        shutil.copytree(BUILTIN / "small", repository / "snapshots" / commit)
    return repository / "snapshots"


def mark(snapshot: Path, value: float) -> None:
    weights = load_file(snapshot / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], value)
    save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})


def test_a_name_is_a_folder_in_the_cache(cache: Path) -> None:
    assert Path(locate("owner/name")) == cache / COMMITS["main"]


def test_a_revision_chooses_the_weights(cache: Path) -> None:
    mark(cache / COMMITS["v1"], 7.0)
    newest, older = (load_model("owner/name", device="cpu", revision=revision)[0] for revision in ("", "v1"))
    assert older.model.norm.weight.unique().tolist() == [7.0]
    assert not torch.equal(newest.model.norm.weight, older.model.norm.weight)


def test_a_model_from_the_hub_is_checked_like_a_folder(cache: Path) -> None:
    (cache / COMMITS["main"] / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled weights are refused"):
        locate("owner/name")


@pytest.mark.usefixtures("cache")
def test_a_name_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="not in the local cache and cannot be downloaded") as caught:
        locate("owner/other", "v2")
    assert "\n" not in str(caught.value)
    assert "revision 'v2'" in str(caught.value)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Where connections are neither accepted nor refused: the queue of a server that never takes them is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield int(server.getsockname()[1])


@pytest.fixture
def hub_at(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    from huggingface_hub import constants

    def move(port: int) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")

    return move


@pytest.mark.parametrize("port", ["closed_port", "silent_port"])
def test_without_a_network_a_name_fails_at_once_in_one_line(
    port: str,
    hub_at: Callable[[int], None],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub, "CONNECT_S", 0.3)
    number = request.getfixturevalue(port)
    hub_at(number)
    began = time.monotonic()
    with pytest.raises(ModelError, match=rf"'owner/other' is not .*http://127\.0\.0\.1:{number} cannot be reached"):
        locate("owner/other")
    assert time.monotonic() - began < 3
    assert caplog.records == []  # the hub's client warned of each retry


def test_without_a_network_a_cached_model_still_loads(
    cache: Path, hub_at: Callable[[int], None], closed_port: int
) -> None:
    hub_at(closed_port)
    assert Path(locate("owner/name")) == cache / COMMITS["main"]
    assert Path(locate("owner/name", "v1")) == cache / COMMITS["v1"]


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    folder = shutil.copytree(BUILTIN / "small", tmp_path / "mine")
    with pytest.raises(ModelError, match=r"model\.revision is 'v1', but .* is a folder"):
        locate(str(folder), "v1")


def split_into_shards(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").unlink()


def test_weights_in_several_files_are_one_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    split_into_shards(folder)
    one, two = (load_model(path, device="cpu")[0] for path in (str(folder), "builtin:small"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    split_into_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        locate(str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ],
)
def test_models_that_do_not_generate_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | change
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match=f"holds {said}: Toolwise trains decoder-only"):
        locate(str(folder))


@pytest.mark.parametrize("file", ["w.bin", "../x.safetensors", "/x.safetensors", "a" * 5000, "\udc80.safetensors"])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=r"not a \*\.safetensors file in its folder"):
        locate(str(folder))


@pytest.mark.parametrize("ids", [-1, [-5, 2], 10**30, "x", [[1]], 1.5, {}, True])
def test_odd_stop_tokens_are_left_out(tmp_path: Path, ids: object) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    assert load_chat(str(folder)).stop_ids[0] == load_chat("builtin:small").stop_ids[0]


def test_an_ordinary_token_may_end_turns_too(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    end = load_chat("builtin:small").end_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 500]}), encoding="utf-8")
    assert load_chat(str(folder)).stop_ids == (end, 500)


@pytest.mark.parametrize(("content", "said"), [(b"\xff\xfe", "is not UTF-8 text"), (b" \n", "is empty")])
def test_a_template_that_is_not_text(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "own.jinja").write_bytes(content)
    with pytest.raises(ModelError, match=said):
        load_chat("builtin:small", chat_template=tmp_path / "own.jinja")
