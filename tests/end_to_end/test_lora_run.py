"""A run that trains LoRA adapters with real peft, from its configuration to the exported model: the engine draws from
what the learner trains, at every update."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import quick_first

from toolwise.agent.agent import RoutedAgent
from toolwise.config.schema import RunConfig, load_config
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.learner.mismatch import MAX_GAP_FP32
from toolwise.models.merged_weights import merged_copy
from toolwise.protocols import Metrics, Sampling
from toolwise.training.loop import train_step
from toolwise.training.run import Run, assemble
from toolwise.training.trainer import Training

MakeConfig = Callable[..., Path]
Cli = Callable[..., Any]
ADAPTED: dict[str, Any] = {
    "deterministic": False,
    "algorithm": {"zero_std_groups": "keep"},
    "validation": {"before": False},
    "actor": {"lr": 5e-3, "lora": {"rank": 4, "alpha": 8.0}},
    "trainer": {"total_steps": 5, "save_every": 5},
    "reward": {"function": "rewards.py:length", "sandbox": {"tier": "off"}},
}
REWARD = """
def length(messages, ground_truth=None):
    '''Any reward that differs within groups will do.'''
    return (sum(len(message.content or '') for message in messages) % 7) / 7
"""


def configured(folder: Path, make_config: MakeConfig, **changes: Any) -> RunConfig:
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    merged = {name: {**ADAPTED.get(name, {}), **value} if isinstance(value, dict) else value
              for name, value in changes.items()}  # fmt: skip
    return load_config(make_config(folder, ADAPTED | merged))


def train(config: RunConfig, out: Path, *, resume: bool = False) -> Run:
    run = assemble(config)
    asyncio.run(Training(run, out, resume=resume).run_training())
    return run


def gaps(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["canary/logprob_gap_max"] for line in lines if "canary/logprob_gap_max" in line]


def prompts(count: int = 4) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 300) for _ in range(draw.randrange(3, 40))] for _ in range(count)]


def greedy(run: Run) -> list[tuple[list[int], list[float]]]:
    """By the run's engine."""

    async def ask() -> Any:
        sampling = Sampling(max_new_tokens=24, do_sample=False, stop_token_ids=(run.chat.end_id,))
        return await asyncio.gather(*(run.policy.generate(ids, sampling) for ids in prompts()))

    return [(list(found.token_ids), list(found.logprobs)) for found in asyncio.run(ask())]


@torch.inference_mode()
def says(model: Any, ids: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each token, and of the likeliest in its place."""
    logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    logp = torch.log_softmax(logits.float(), dim=-1)
    return logp[range(len(tokens)), tokens], logp.max(-1).values


def assert_draws_from(run: Run, merged: Any) -> None:
    """The engine's greedy replies, and their log-probs, are those of a plain model in transformers."""
    for ids, (tokens, logprobs) in zip(prompts(), greedy(run), strict=True):
        chosen, likeliest = says(merged, ids, tokens)
        torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=0, atol=1e-4)
        assert (likeliest - chosen).max() < 1e-4
        written = merged.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=run.chat.end_id, pad_token_id=0
        )
        assert written[0, len(ids) :].tolist() == tokens


def exported(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_adapters_alone(out: Path, folder: Path, cli: Cli, base: Any, merged: Any) -> None:
    """Plain peft loads what `--adapters` exports, and answers like the merged model."""
    from peft import PeftModel

    ended = cli("export", out, "--out", folder / "adapters", "--adapters")
    assert ended.status == 0, ended.err
    assert "adapters of step" in ended.out
    names = {path.name for path in (folder / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md", "tools.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    card = (folder / "adapters" / "README.md").read_text(encoding="utf-8")
    assert "library_name: peft" in card
    assert 'base = AutoModelForCausalLM.from_pretrained("builtin:small")' in card
    assert "adapters of rank 4 (alpha 8), to be added to the base model" in card
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapters").eval()
    for ids in prompts():
        with torch.inference_mode():
            found, expected = (model(input_ids=torch.tensor([ids])).logits for model in (loaded, merged))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def assert_whole_loop(config: RunConfig, folder: Path, cli: Cli, steps: int) -> None:
    out = folder / "run"
    run = train(config, out)
    assert isinstance(run.policy.engine.runner, CpuRunner)  # type: ignore[attr-defined]
    assert len(gaps(out)) == steps
    assert max(gaps(out)) < MAX_GAP_FP32
    moved = [w for name, w in run.policy.model.named_parameters() if "lora_B" in name]
    assert moved
    assert all(weight.abs().max() > 0 for weight in moved)

    ended = cli("export", out, "--out", folder / "exported")
    assert ended.status == 0, ended.err
    merged = exported(folder / "exported")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert_draws_from(run, merged)
    base = exported(Path(run.policy.model.config._name_or_path))
    assert_adapters_alone(out, folder, cli, base, merged)
    written = [says(base, ids, tokens)[0] for ids, (tokens, _) in zip(prompts(), greedy(run), strict=True)]
    assert max(float((a - torch.tensor(b)).abs().max()) for a, (_, b) in zip(written, greedy(run), strict=True)) > 0.01

    ended = cli("eval", out, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["score"] == pytest.approx(run.progress.last["score"])  # type: ignore[index]

    trainer = config.trainer.model_copy(update={"total_steps": steps + 2})
    resumed = train(config.model_copy(update={"trainer": trainer}), out, resume=True)
    assert resumed.progress.step == steps + 2
    assert len(gaps(out)) == steps + 2
    assert max(gaps(out)) < MAX_GAP_FP32


def test_the_whole_loop(tmp_path: Path, make_config: MakeConfig, cli: Cli) -> None:
    assert_whole_loop(configured(tmp_path, make_config), tmp_path, cli, 5)


@pytest.mark.long
def test_the_whole_loop_over_fifty_updates(tmp_path: Path, make_config: MakeConfig, cli: Cli) -> None:
    config = configured(tmp_path, make_config, trainer={"total_steps": 50, "save_every": 50})
    assert_whole_loop(config, tmp_path, cli, 50)


ROUTER = {"enable": True, "cost": "calls", "wording": "silent", "lr": 1e-2}
NEIGHBOURS: dict[str, dict[str, Any]] = {
    "router": {"router": ROUTER, "rollout": {"n": 6, "max_new_tokens": 16}},
    "router that moves the adapters": {
        "router": ROUTER | {"backbone": "full", "optimizer": "own"},
        "rollout": {"n": 6, "max_new_tokens": 16},
    },
    "router in the actor's optimiser": {
        "router": ROUTER | {"optimizer": "actor"},
        "rollout": {"n": 6, "max_new_tokens": 16},
    },
    "reference": {"algorithm": {"kl": "loss", "kl_coef": 0.1}},
    "critic": {"algorithm": {"adv_estimator": "gae"}, "critic": {"lr": 1e-3}},
    "thinking levels": {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {"enable": True}}},
    "step-level credit": {"algorithm": {"adv_estimator": "gigpo"}},
    "router and thinking levels": {
        "router": ROUTER,
        "rollout": {"n": 6, "max_new_tokens": 16},
        "algorithm": {"adv_estimator": "rlvcr", "rlvcr": {"enable": True}},
    },
    "checkpointing": {"actor": {"activation_checkpointing": True}},
    "deterministic": {"deterministic": True},
    "some layers": {"actor": {"lora": {"rank": 2, "alpha": 16.0, "target_modules": ["q_proj", "down_proj"]}}},
    "transformers": {"rollout": {"engine": "transformers"}},
}


QUICK = ("router and thinking levels",)


@pytest.mark.parametrize("beside", quick_first(NEIGHBOURS, QUICK))
def test_adapters_beside(beside: str, tmp_path: Path, make_config: MakeConfig) -> None:
    run = assemble(configured(tmp_path, make_config, **NEIGHBOURS[beside]))

    async def go() -> list[Metrics]:
        return [(await train_step(run)).metrics for _ in range(3)]

    try:
        found = [metrics["canary/logprob_gap_max"] for metrics in asyncio.run(go())]
        assert max(found) < MAX_GAP_FP32
        run.learner.save_model(tmp_path / "model")
        assert_draws_from(run, exported(tmp_path / "model"))
    finally:
        run.close()


def actor_state(run: Run) -> dict[str, torch.Tensor]:
    """The adapters, the optimiser's moments and the router's head."""
    state = run.learner.state_dict()  # type: ignore[attr-defined]
    tensors = {f"adapter {name}": weight for name, weight in state["adapters"].items()}
    for number, moments in state["optimizer"]["adamw"]["state"].items():
        tensors |= {f"{name} {number}": value for name, value in moments.items()}
    if run.head is not None:
        tensors |= {f"head {name}": weight for name, weight in run.head.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("beside", quick_first(["router and thinking levels", "reference"], ["reference"]))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(beside: str, tmp_path: Path, make_config: MakeConfig) -> None:
    changes = {"trainer": {"total_steps": 2, "save_every": 1, "keep_checkpoints": 2}, "deterministic": True}
    short = {"rollout": {"n": 6 if "router" in beside else 2, "max_new_tokens": 12}}
    config = configured(tmp_path, make_config, **NEIGHBOURS[beside] | changes | short)
    whole = actor_state(train(config, tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")  # as if it had been killed before
    parts = actor_state(train(config, tmp_path / "run", resume=True))
    assert whole.keys() == parts.keys()
    assert any(bool(weight.any()) for name, weight in whole.items() if "lora_B" in name)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def test_layers_that_the_model_does_not_have_are_named_before_anything_runs(
    tmp_path: Path, make_config: MakeConfig, cli: Cli
) -> None:
    configured(tmp_path, make_config, actor={"lora": {"rank": 4, "target_modules": ["q_prj"]}})
    ended = cli("train", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert ended.status == 2
    assert "no layer 'q_prj'; did you mean 'q_proj'" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.long
def test_a_routed_agent_answers_the_same_from_its_checkpoint_and_its_export(
    tmp_path: Path, make_config: MakeConfig, cli: Cli
) -> None:
    changes = NEIGHBOURS["router and thinking levels"] | {"trainer": {"total_steps": 2, "save_every": 2}}
    run = train(configured(tmp_path, make_config, **changes), tmp_path / "run")
    ended = cli("export", tmp_path / "run", "--out", tmp_path / "exported")
    assert ended.status == 0, ended.err
    tools = {"tools": ["calculator", "search"], "documents": ["Alder has 12 mills."]}
    agents = [RoutedAgent.load(folder, **tools) for folder in (tmp_path / "run", tmp_path / "exported")]
    for question in ("How many mills does Alder have?", "What is 3 + 4?"):
        first, second = (agent.ask(question) for agent in agents)
        assert (first.text, first.route, first.calls) == (second.text, second.route, second.calls)
        assert first.route_probs == pytest.approx(second.route_probs, abs=1e-6)
    trained = dict(run.head.named_parameters())  # type: ignore[union-attr]
    for agent in agents:
        loaded = dict(agent.routing.predictor.head.named_parameters())
        assert all(torch.equal(loaded[name], weight) for name, weight in trained.items())
        assert_same_policy(agent.routing.policy.model, run.policy.model)


def assert_same_policy(model: Any, adapted: Any) -> None:
    weights = merged_copy(adapted).state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
