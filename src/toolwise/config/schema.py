"""A run, typed: what a configuration file may say. Every field is documented here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.algorithm import AlgorithmConfig
from toolwise.config.loader import Section, apply_overrides, build_config, read_settings
from toolwise.config.paths import resolve_paths
from toolwise.config.router import RouterConfig


class ModelConfig(Section):
    path: str = "builtin:small"
    """A folder in Hugging Face's form, a hub name, or "builtin:small", the model that ships."""
    device: str = "auto"
    """"auto" takes a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
    """Let Python code of the model's folder run, in this process and with all its rights: read it first."""
    threads: PositiveInt | None = None
    """Of a CPU; by default one for a model under 4 million weights, for whom waking others costs more than it saves."""


class DataConfig(Section):
    train: Path | None = None
    """Parquet or JSONL of tasks to learn from."""
    val: Path | None = None
    """Held-out tasks, never learned from."""
    batch_size: PositiveInt = 16
    """Tasks a step."""
    shuffle: bool = True
    drop_last: bool = True
    limit: PositiveInt | None = None
    """Read only the first so many training rows."""
    val_limit: PositiveInt | None = None


class VllmConfig(Section):
    """The server of `rollout.engine = "vllm"`: docs/engine.md."""

    base_url: str = ""
    """Of one that runs: http://localhost:8000/v1. Without it one is started here, and ended with the run."""
    command: list[str] = Field(default_factory=lambda: ["vllm", "serve"], min_length=1)
    """What starts it, with any options of yours; the model, the port and what training needs are added."""
    model: str = ""
    """The name that it serves the model under; the first that it lists, where none is given."""
    api_key_env: str = ""
    """The environment's variable that holds its key, where it wants one."""
    weights_dir: Path | None = None
    """A folder that this process writes and the server reads; a temporary one where none is given."""
    start_s: PositiveFloat = 600.0
    """How long a server may take to start."""
    timeout_s: PositiveFloat = 600.0
    """Of one request, or of one step of a weight transfer."""


class GrammarConfig(Section):
    """What every turn of a rollout must follow, one of these: pip install 'toolwise[grammar]'. What is drawn so is not
    what the model would have drawn, which training does not correct for: docs/engine.md."""

    json_schema: Path | None = None
    regex: str = ""
    lark: Path | None = None
    tool_calls: bool = False
    """Anything, but a tool call has a tool's name and arguments as its schema says; for the parsers hermes and qwen."""

    @model_validator(mode="after")
    def _check_one_given(self) -> GrammarConfig:
        if sum(map(bool, (self.json_schema, self.regex, self.lark, self.tool_calls))) > 1:
            raise ValueError("a turn follows one grammar: give json_schema, regex, lark or tool_calls")
        return self


class RolloutConfig(Section):
    n: PositiveInt = 8
    """Rollouts a task: the group that advantages are compared within."""
    engine: Literal["toolwise", "transformers", "vllm"] = "toolwise"
    """What generates: our engine over the learner's own weights; transformers' forward pass in batches, which takes any
    model; or a vLLM server."""
    vllm: VllmConfig = VllmConfig()
    do_sample: bool = True
    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt = 256
    """Tokens a turn at most."""
    tool_parser: Literal["auto", "hermes", "qwen", "llama3", "mistral", "rlla", "action", "openai", "none"] = "hermes"
    """How calls are read from what the model writes. "auto" goes by the chat template, else by each text; "openai"
    leaves it to the server; "none" leaves text as it is (RLLA: nothing executes)."""
    tool_prompt: Literal["auto", "template", "system"] = "auto"
    """Who tells the model of its tools: its chat template, or we in the system message, in the form that `tool_parser`
    reads. "auto" leaves it to a template that shows them, and does it for one that ignores them."""
    grammar: GrammarConfig = GrammarConfig()
    on_template_change: Literal["append", "fork"] = "append"
    """Where a template would write earlier turns otherwise (drop thoughts): go on after what was sampled, one row a
    rollout; or begin a new row as the template has it."""
    cache_mb: PositiveInt | None = None
    """Memory of the engine's cache; where it is not given, half of what a GPU has free when the run begins (training
    needs its share too), or up to 4 GiB on a CPU."""
    max_batch: PositiveInt = 256
    """Requests that generate together at most."""
    max_concurrent: PositiveInt = 1024
    """Episodes at once at most."""
    max_concurrent_requests: PositiveInt | None = None
    """Of them, how many may wait for the model; as many as there are, where it is not given."""
    max_concurrent_envs: PositiveInt | None = None
    """Of them, how many may be in their world's `reset` or `step`."""
    deadline_s: PositiveFloat = 600.0
    """Wall-clock time an episode may take, tools, waiting and all."""
    max_episode_tokens: PositiveInt | None = None
    """Tokens sampled over a whole episode at most."""


class MultiTurnConfig(Section):
    enable: bool = True
    """False: one reply a rollout, and no tools."""
    max_turns: PositiveInt = 10
    tool_timeout_s: PositiveFloat = 30.0
    max_concurrent_calls: PositiveInt | None = None
    """Calls of one tool at once at most; a tool's own `max_concurrent` comes first."""
    max_result_chars: PositiveInt = 4000
    """What a tool says is cut after so many characters, and says how many are missing."""
    max_invalid_in_a_row: PositiveInt = 3
    """An episode ends after so many invalid actions in a row."""
    held_out_tools: list[str] = Field(default_factory=list)
    """Tools that training never offers; validation does, and reports the tasks that name one of them apart."""


class EnvConfig(Section):
    """The world of an episode: docs/environments.md."""

    name: str = "tools"
    """"tools", "gsm8k", "gymnasium:ID", or a class as package.module:Class or path/to/file.py:Class"""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its options; a task's own, in `extra_info.env_kwargs`, come over them."""
    interaction: str = ""
    """Who answers when the agent speaks: nobody, "scripted", or a class or function by reference."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_user_turns: PositiveInt = 10


class RewardPart(Section):
    function: str
    name: str = Field(default="", pattern=r"^[\w.:+-]*$")
    """What metrics, records and the report call it; the function's name where it is not given."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    weight: float = 1.0


class SandboxConfig(Section):
    """Where reward functions run: docs/security.md."""

    tier: Literal["off", "basic", "standard", "namespaced"] = "standard"
    """"off" runs them in the trainer's own process, where they can do all that you can."""
    timeout_s: PositiveFloat = 30.0
    """Of one call of a function, its import included."""
    memory_mb: PositiveInt = 1024
    """What a function may take beyond what its worker has anyway."""
    read: list[Path] = Field(default_factory=list)
    """Files and folders that functions may read besides their own file, the modules beside it that they import and
    the installed packages."""
    permissions: list[Literal["network", "subprocess"]] = Field(default_factory=list)
    require: bool = False
    """Refuse to run where this machine gives less than the tier asks for."""
    workers: PositiveInt | None = None
    """Worker processes at most; as many as there are cores, up to 8, where it is not given."""
    trusted: list[str] = Field(default_factory=lambda: ["toolwise.rewards.library.judge"])
    """Modules whose rewards run in the trainer's own process: the judge, which asks a server and keeps a cache."""


class RewardConfig(Section):
    function: str = ""
    """package.module:function, path/to/file.py:function, or a module or file with one function marked as a reward;
    "env" and "tools" are what an episode's steps and its tools' calc_reward earned"""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    parts: list[RewardPart] = Field(default_factory=list)
    """Several rewards in place of `function`: [[reward.parts]] tables of function, name, weight and kwargs."""
    combine: Literal["sum", "normalize"] = "sum"
    """Add the parts by weight as they are, or each normalised within its group first."""
    sandbox: SandboxConfig = SandboxConfig()
    max_error_rate: float = Field(default=0.2, ge=0.0, le=1.0)
    """The run stops when more than this share of a step's rollouts could not be scored."""


class FaultsConfig(Section):
    """How much may fail before a run stops, with a checkpoint: docs/diagnosis.md. Each is a share of the latest
    rollouts or tool calls, `window` of them or more; 1 never stops. For rewards there is `reward.max_error_rate`."""

    policy: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts that ended by a fault of the policy: token ids that the model does not have, a server that is gone."""
    env: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts that ended by a fault of the environment, or of a tool when it was created or asked for its reward."""
    deadline: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts that passed `rollout.deadline_s`."""
    infrastructure: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts in which something behind a tool was down: a server, a worker process."""
    tool: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tool calls that raised or were late. Many tools fail often for good reasons: without a bound by default."""
    parse: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tool calls that could not be read. A model may have that still to learn: without a bound by default."""
    window: PositiveInt = 64
    """Rollouts, or calls, that are judged together: those of the latest steps until there are so many."""


class LoraConfig(Section):
    """Adapters in place of the whole model: pip install 'toolwise[peft]'."""

    rank: int = Field(default=0, ge=0)
    """0: no adapters, the whole model learns."""
    alpha: PositiveFloat = 32.0
    target_modules: list[str] = Field(default_factory=list)
    """Names of layers; none: all linear ones but the head."""


class ActorConfig(Section):
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    schedule_steps: PositiveInt | None = None
    """When a falling rate has fallen; the end of the run where it is not given."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """What is left of the rate then."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    spike_factor: float = Field(default=20.0, ge=0.0)
    """Skip a step whose gradient is more than max_grad_norm and so many times the running median; 0: never."""
    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    dual_clip: float = Field(default=3.0, ge=0.0)
    """A bad token that has become likelier counts so many times its advantage at most; 0: without bound."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    ppo_epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    """Optimiser steps an epoch."""
    loss_aggregation: Literal["token", "step", "rollout", "constant"] = "token"
    """What weighs the same: each token, each decision, each rollout; "constant" divides all by loss_length."""
    loss_length: PositiveInt | None = None
    """Tokens that a rollout is divided by under "constant" (Dr. GRPO): as many as it may have."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """What ratios are taken against: the log-probs that tokens were drawn with, or the learner's own of the same
    weights, with what is between the two as a bounded weight."""
    importance_cap: PositiveFloat = 2.0
    """The bound of that weight."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens in memory at a time; changes speed and memory, never the result."""
    share_prefixes: bool = True
    """Compute what rows have in common once."""
    logit_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at a time; by default 1,024, on a GPU as many as half a GiB has room for."""
    activation_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping what they gave."""
    canary: Literal["stop", "warn", "off"] = "stop"
    """When policy and learner disagree on the log-probs of the same tokens under the same weights."""
    lora: LoraConfig = LoraConfig()


class CriticConfig(Section):
    """Who foresees returns, for an estimator that needs values (gae)."""

    path: str = ""
    """A model with the same tokens, a smaller one for example; a copy of the policy's where it is not given."""
    lr: PositiveFloat = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    value_clip: float = Field(default=0.2, ge=0.0)
    """How far a value may move in one update before it stops counting; 0: without bound."""
    epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    """Optimiser steps an epoch."""


class ValidationConfig(Section):
    do_sample: bool = False
    every: int = Field(default=0, ge=0)
    """Validate every so many steps; 0: only before and after."""
    before: bool = True


class TrainerConfig(Section):
    total_steps: PositiveInt = 100
    save_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    keep_best: bool = True
    """Keep the checkpoint of the best validation as well, and save one whenever a validation is the best so far. With
    router.budgets, one that keeps within them (up to 5 % over) is better than any that does not."""
    best_metric: str = "score"
    """The figure of a validation that this goes by: "correct", "lookup/score", …; "-cost": the lowest is the best."""
    console: bool = True


class RunConfig(Section):
    """One training run."""

    name: str = "run"
    seed: int = Field(default=0, ge=0)
    deterministic: bool = False
    """One thread, all rollouts turn by turn in a fixed order: the same run again gives the same figures."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    tools: list[str | dict[str, Any]] = Field(default_factory=list)
    """Built-in names, references, or tables {name = …, price = …, …}."""
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    reward: RewardConfig = RewardConfig()
    faults: FaultsConfig = FaultsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    router: RouterConfig = RouterConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    validation: ValidationConfig = ValidationConfig()
    trainer: TrainerConfig = TrainerConfig()


INFERENCE_FIELDS: dict[str, Any] = {
    "rollout": {
        "temperature": True,
        "max_new_tokens": True,
        "tool_parser": True,
        "tool_prompt": True,
        "grammar": {"regex", "tool_calls"},
        "on_template_change": True,
        "max_episode_tokens": True,
    },
    "multi_turn": {"enable", "max_turns", "tool_timeout_s", "max_result_chars", "max_invalid_in_a_row"},
}
"""Settings that a trained agent needs wherever it is used: neither paths nor what only a machine or training needs."""


def inference_settings(config: RunConfig) -> dict[str, Any]:
    """What is recorded beside an agent's weights, as a configuration says it."""
    return config.model_dump(mode="json", include=INFERENCE_FIELDS, exclude_none=True)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A run from a TOML or YAML file and `a.b=c` overrides.

    Paths in the file are relative to the file, those of the overrides to the working directory.
    """
    settings = resolve_paths(read_settings(path), Path(path).resolve().parent)
    return build_config(RunConfig, apply_overrides(settings, overrides), source=str(path))
