"""What a run checks about its model before it trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, FalconH1Config, MambaConfig, RecurrentGemmaConfig

from toolwise.config.schema import RunConfig
from toolwise.engine import engine_path
from toolwise.errors import ConfigError, ModelError
from toolwise.messages import ToolCall
from toolwise.models import BUILTIN
from toolwise.rollout.parsers import RENDERERS
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
from toolwise.tools.catalog import build_tools
from toolwise.training import chat_check, model_check
from toolwise.training.chat_check import open_chat, show_prompt
from toolwise.training.model_check import check_model, check_weights, require_model
from toolwise.training.rollout_setup import local_policy
from toolwise.training.run import assemble
from toolwise.types.findings import Finding


def small_model(tmp_path: Path, **settings: Any) -> Path:
    """A copy of the model that ships, with other settings in its config.json."""
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | settings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def with_path(folder: Path | str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": str(folder), "device": "cpu"}, **sections})


def findings(config: RunConfig, *tools: Any) -> dict[str, Finding]:
    built = build_tools([*tools])
    return {finding.name: finding for finding in check_model(*open_chat(config), config, built)}


def test_the_chat_is_checked_without_the_weights(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    with pytest.raises(ModelError, match="leaves out an assistant turn"):
        require_model(with_path(folder), {})


def test_the_prompt_that_is_shown_names_the_tools() -> None:
    tools = build_tools(["calculator"])
    assert "calculator" in show_prompt(open_chat(RunConfig())[0], tools)


def add_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(5_000)])
    tokenizer.save_pretrained(folder)


def test_a_tokenizer_with_more_tokens_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    add_tokens(folder)
    config = with_path(folder)
    with pytest.raises(ConfigError, match=r"the tokenizer has [\d,]+ tokens, the model's embeddings only"):
        require_model(config, {})
    policy = local_policy(config, config.model.path)
    with pytest.raises(ConfigError, match=r"the tokenizer has [\d,]+ tokens, the model's embeddings only"):
        check_weights(policy)


def test_a_run_is_refused_before_its_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_model(tmp_path)
    add_tokens(folder)
    monkeypatch.setattr("toolwise.training.run.load_split", lambda *_: pytest.fail("the data were read"))
    config = with_path(folder, reward={"sandbox": {"tier": "off"}}, data={"train": "missing.jsonl"})
    with pytest.raises(ConfigError, match="the tokenizer has"):
        assemble(config, reward=lambda messages, ground_truth: 0.0)


def test_the_sizes_path_and_memory_are_those_of_the_loaded_model() -> None:
    config = with_path("builtin:small")
    found = findings(config)
    policy = local_policy(config, config.model.path)
    assert found["model"].figures["parameters"] == sum(p.numel() for p in policy.model.parameters())
    assert found["model"].figures["context"] == policy.max_context
    assert found["engine"].figures["path"] == engine_path(policy.model)[0]
    assert found["memory"].figures == model_check.memory_parts(policy.model, config)


def test_training_that_does_not_fit_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_path("builtin:small")
    needed = sum(findings(config)["memory"].figures.values())
    monkeypatch.setattr(model_check, "device_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=r"memory: [\d.]+ GB do not fit: .*: use a smaller model, actor\.lora\.rank"):
        require_model(config, {})
    require_model(with_path("builtin:small", actor={"lora": {"rank": 2}}), {})


def test_more_new_tokens_than_the_context_are_refused(tmp_path: Path) -> None:
    folder = small_model(tmp_path, max_position_embeddings=1024)
    with pytest.raises(ConfigError, match=r"max_new_tokens is 1,024, the model's context 1,024 tokens: no prompt fits"):
        require_model(with_path(folder, rollout={"max_new_tokens": 1024}), {})
    require_model(with_path(folder, rollout={"max_new_tokens": 512}), {})


def model_of(tmp_path: Path, config: Any) -> Path:
    """The tokenizer that ships, with the config.json of another architecture."""
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "other"))
    config.save_pretrained(folder)
    return folder


def test_adapters_that_do_not_fit_the_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.lora\.rank is 4096, but .*: use a rank of at most \d+"):
        require_model(with_path("builtin:small", actor={"lora": {"rank": 4096}}), {})
    mamba = model_of(tmp_path, MambaConfig(vocab_size=5000, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ConfigError, match=r"actor\.lora\.target_modules does not fit Mamba.*'out_proj'"):
        require_model(with_path(mamba, actor={"lora": {"rank": 2}}), {})
    require_model(with_path(mamba, actor={"lora": {"rank": 2, "target_modules": ["in_proj", "x_proj"]}}), {})


def test_logits_that_the_learner_does_not_compute_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8}
    config = FalconH1Config(vocab_size=5000, **shape, **mamba, num_key_value_heads=2, lm_head_multiplier=0.5)
    folder = model_of(tmp_path, config)
    with pytest.raises(ConfigError, match=r"learner: the logits of FalconH1ForCausalLM are not .*: train another"):
        require_model(with_path(folder), {})
    routed = {"enable": True, "train_actor": False, "backbone": "frozen"}
    assert "learner" not in findings(with_path(folder, router=routed))


def test_recurrent_gemma_is_refused(tmp_path: Path) -> None:
    """It caps its logits in a way that the learner does not know."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    folder = model_of(tmp_path, RecurrentGemmaConfig(vocab_size=5000, lru_width=32, logits_soft_cap=1.0, **shape))
    with pytest.raises(ConfigError, match=r"the logits of RecurrentGemmaForCausalLM are not .*: train another model"):
        require_model(with_path(folder), {})


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = RunConfig.model_validate({"model": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r'model\.device is "cuda", but PyTorch finds no GPU'):
        require_model(config, {})


def test_stop_ids_outside_the_vocabulary_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = small_model(tmp_path)
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 999_999]}), encoding="utf-8")
    found = findings(with_path(folder))["turn end"]
    assert found.verdict == "warning"
    assert "also names 999999, outside the vocabulary of" in found.says
    require_model(with_path(folder), {})
    assert "999999" in caplog.text
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ["<eos>"]}), encoding="utf-8")
    assert "also names '<eos>', outside the vocabulary" in findings(with_path(folder))["turn end"].says


def test_stop_ids_that_are_ordinary_tokens_are_noted(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    word = tokenizer.encode("a", add_special_tokens=False)[0]
    assert findings(with_path(folder))["turn end"].verdict == "ok"
    settings = {"eos_token_id": [tokenizer.eos_token_id, word]}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = findings(with_path(folder))["turn end"]
    assert found.verdict == "warning"
    assert f"tokens of ordinary text, at which replies are cut: {word} ('a')" in found.says
    assert "remove them from eos_token_id" in found.cure


def named_tool(name: str, parameter: str = "word") -> BaseTool:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    spec = {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    return NamedTool(OpenAIFunctionToolSchema.model_validate(spec))


class NamedTool(BaseTool):
    def __init__(self, schema: OpenAIFunctionToolSchema) -> None:
        super().__init__({}, schema)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return "", None, {}


NAMES = ["my tool</tool_call>.é", "a\nb", "my<tool", "x|y", 'a"b', "sp ace", "a{b", "", "<|end|>"]
PLAIN = ["look_up", "get-weather", "Search2", "suche_über", "a.b"]


@pytest.mark.parametrize("form", sorted(set(RENDERERS) - {"action", "qwen", "smollm3", "granite"}))
def test_names_that_a_format_cannot_carry_are_refused(form: str) -> None:
    """Those that are accepted come back from a call; plain ones are accepted by every format."""
    config = with_path("builtin:small", rollout={"tool_parser": form})
    chat, call_format = open_chat(config)
    for name in [*NAMES, *PLAIN]:
        found = chat_check._tool_names(chat, call_format, {name: named_tool(name)})
        call = ToolCall(id="call_0", name=name, arguments={"word": "x"})
        _, calls = call_format.parse(call_format.render("", [call])) if call_format.render else ("", [])
        if [(c.name, c.arguments) for c in calls] != [(name, call.arguments)]:
            assert found.verdict == "wrong", name
        if name in ("look_up", "Search2"):
            assert found.verdict == "ok", name


def test_a_run_with_such_a_name_ends_with_one_line() -> None:
    name = "my tool</tool_call>.é"
    config = with_path("builtin:small", rollout={"tool_parser": "glm"})
    with pytest.raises(ConfigError, match=r"tool names: calls in the format glm cannot carry the tool .*: rename it"):
        require_model(config, {name: named_tool(name)})
    config = with_path("builtin:small", rollout={"tool_parser": "qwen3_coder"})
    with pytest.raises(ConfigError, match=r"cannot carry the parameters 'a>b' of the tool 'f'"):
        require_model(config, {"f": named_tool("f", "a>b")})


def test_half_precision_needs_a_gpu() -> None:
    config = RunConfig.model_validate({"model": {"dtype": "bfloat16"}})
    model_check.check_dtype(config, "cuda")
    with pytest.raises(ConfigError, match=r"model\.dtype is bfloat16 on a CPU"):
        model_check.check_dtype(config, "cpu")


def test_an_optimizer_on_the_cpu_takes_no_memory_of_a_gpu() -> None:
    config = RunConfig.model_validate({"actor": {"optimizer_state": "cpu"}})
    model = torch.nn.Linear(4, 2, bias=False)
    model.dtype = torch.float32
    assert set(model_check.memory_parts(model, config, "cuda")) == {"weights", "gradients"}
    assert model_check.memory_parts(model, config, "cpu")["optimizer states"] == 2 * 4 * 8
