"""Model folders that contain Python code: it runs only if a setting allows it."""

from __future__ import annotations

import io
import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import ModelError
from toolwise.models import BUILTIN, load_model

CONFIG = """
import pathlib
pathlib.Path({ran!r}).write_text("config")
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
import pathlib
pathlib.Path({ran!r}).write_text("model")
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
import pathlib
pathlib.Path({ran!r}).write_text("tokenizer")
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def change(file: Path, **changes: Any) -> None:
    value = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The file that the code of the folder writes when it runs."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, ran: Path) -> Path:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    (folder / "configuration_own.py").write_text(CONFIG.format(ran=str(ran)), encoding="utf-8")
    (folder / "modeling_own.py").write_text(MODEL.format(ran=str(ran)), encoding="utf-8")
    (folder / "tokenization_own.py").write_text(TOKENIZER.format(ran=str(ran)), encoding="utf-8")
    return folder


def own_model(folder: Path) -> None:
    mapped = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    change(folder / "config.json", model_type="own", auto_map=mapped)


def test_a_yes_on_standard_input_allows_nothing(
    folder: Path, ran: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_model(folder)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n', encoding="utf-8")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    done = cli("sft", data, "--model", folder, "--out", tmp_path / "out", "--steps", "1")
    assert not ran.exists()
    assert not (tmp_path / "out").exists()
    assert done.status == 2
    (line,) = [line for line in done.err.splitlines() if line.startswith("toolwise:")]
    assert "needs to run its own Python code (configuration_own.py, modeling_own.py)" in line
    assert "model.trust_remote_code = true allows it" in line
    assert "Do you wish" not in done.out + done.err


@pytest.mark.parametrize(
    "mapped",
    [{"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, ["a.B", "tokenization_own.OwnTokenizer"]],
    ids=["table", "list"],
)
def test_a_tokenizers_code_does_not_run(folder: Path, ran: Path, mapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked"))
    change(folder / "tokenizer_config.json", auto_map=mapped, tokenizer_class="OwnTokenizer")
    with pytest.raises(ModelError, match=r"needs to run its own Python code \(.*tokenization_own\.py"):
        load_model(str(folder), device="cpu")
    assert not ran.exists()


def test_a_model_that_transformers_knows_itself_loads_without_the_code(folder: Path, ran: Path) -> None:
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})
    model, _ = load_model(str(folder), device="cpu")
    assert type(model).__module__.startswith("transformers.")
    assert not ran.exists()


def test_the_setting_allows_it_and_says_what_runs(
    folder: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    own_model(folder)
    with caplog.at_level(logging.WARNING):
        model, _ = load_model(str(folder), device="cpu", trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    assert ran.exists()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "toolwise.models"]
    assert "configuration_own.py, modeling_own.py" in said
    assert "all your permissions" in said


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_a_hub_is_code_too(folder: Path, name: str) -> None:
    change(folder / "config.json", **{name: "someone/kernel"})
    with pytest.raises(ModelError, match=r"needs to run its own Python code \(someone/kernel\)"):
        load_model(str(folder), device="cpu")


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "pickle")


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside safetensors"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "adapter_model.bin", "training_args.bin"])
def test_pickles_are_never_opened(folder: Path, ran: Path, name: str, beside: bool) -> None:
    (folder / name).write_bytes(pickle.dumps(Payload(ran)))
    if beside:
        load_model(str(folder), device="cpu")
    else:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="pickled weights are refused"):
            load_model(str(folder), device="cpu")
    assert not ran.exists()


def test_an_index_that_names_a_pickle(folder: Path, ran: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "evil.bin").write_bytes(pickle.dumps(Payload(ran)))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "evil.bin", "lm_head.weight": "../evil.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")
    assert not ran.exists()
