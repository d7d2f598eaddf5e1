"""The typed configuration of a run. The field docstrings are the source of docs/settings.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.agent import AgentConfig
from toolwise.config.algorithm import AlgorithmConfig
from toolwise.config.cluster import ClusterConfig
from toolwise.config.correction import CorrectionConfig
from toolwise.config.data import DataConfig
from toolwise.config.loader import Section, apply_overrides, build_config, read_settings
from toolwise.config.paths import resolve_paths
from toolwise.config.records import RecordsConfig
from toolwise.config.rollout import RolloutConfig
from toolwise.config.router import RouterConfig
from toolwise.config.trainer import TrainerConfig
from toolwise.errors import ConfigError


class ModelConfig(Section):
    path: str = "builtin:small"
    """Hugging Face model folder, hub name (owner/name), or "builtin:small", the bundled model."""
    revision: str = ""
    """Branch, tag or commit of a model from a hub; empty: its main branch."""
    base: str = ""
    """Folder or hub name of the base model, where `path` holds LoRA adapters alone; empty: the one that they name."""
    chat_template: Path | None = None
    """Jinja file to use instead of the model's own chat template; checkpoints and exports contain it."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values for the chat template, such as {enable_thinking = false}, {reasoning_effort = "low"} or
    {date_string = "1 January 2026"}."""
    device: str = "auto"
    """"auto": a GPU if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights, also in checkpoints; "auto": bfloat16 on a GPU, float32 on a CPU. The optimizer works on
    float32 copies of them."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder, in this process and with all its permissions; read it first."""
    threads: PositiveInt | None = None
    """CPU threads; unset: one for models under 4 million weights, where waking other threads costs more than it
    saves."""


class MultiTurnConfig(Section):
    enable: bool = True
    """False: one reply per rollout, and no tools."""
    max_turns: PositiveInt = 10
    """Maximum turns per episode."""
    tool_timeout_s: PositiveFloat = 30.0
    """Timeout of one tool call, in seconds."""
    max_concurrent_calls: PositiveInt | None = None
    """Maximum concurrent calls per tool; a tool's own `max_concurrent` takes precedence."""
    max_result_chars: PositiveInt = 4000
    """Tool results are cut to this many characters, with a note on how many are missing."""
    max_invalid_in_a_row: PositiveInt = 3
    """An episode ends after this many invalid actions in a row."""
    held_out_tools: list[str] = Field(default_factory=list)
    """Tools that training never offers; validation does, and reports the tasks that name one of them separately."""


class EnvConfig(Section):
    """The environment of an episode: docs/environments.md."""

    name: str = "tools"
    """"tools", "gsm8k", "gymnasium:ID", or a class as package.module:Class or path/to/file.py:Class."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment; a task's `extra_info.env_kwargs` override them."""
    interaction: str = ""
    """Simulated user who replies when the agent speaks: none (empty), "scripted", or a class or function by
    reference."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the simulated user; a task's `interaction_kwargs` override them."""
    max_user_turns: PositiveInt = 10
    """Maximum replies of the simulated user per episode."""


class RewardPart(Section):
    function: str
    """As in `reward.function`."""
    name: str = Field(default="", pattern=r"^[\w.:+-]*$")
    """Name in metrics, records and the report; empty: the function's name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    weight: float = 1.0
    """Weight in the combined score."""


class SandboxConfig(Section):
    """Where reward functions run: docs/security.md."""

    tier: Literal["off", "basic", "standard", "namespaced"] = "standard"
    """Isolation level; "off" runs them in the trainer's process, with all your permissions."""
    timeout_s: PositiveFloat = 30.0
    """Timeout of one call, including the import, in seconds."""
    memory_mb: PositiveInt = 1024
    """Memory limit in MB, beyond what the worker process itself uses."""
    read: list[Path] = Field(default_factory=list)
    """Files and folders that functions may read besides their own file, the modules they import from its folder, and
    the installed packages."""
    permissions: list[Literal["network", "subprocess"]] = Field(default_factory=list)
    """Additional permissions of the functions."""
    require: bool = False
    """Refuse to run if this machine cannot provide the full tier."""
    workers: PositiveInt | None = None
    """Maximum number of worker processes that run at once; unset: the number of cores, up to 8. Between steps as many
    wait for each of the reward's parts, for the latest four."""
    trusted: list[str] = Field(default_factory=lambda: ["toolwise.rewards.library.judge"])
    """Modules whose rewards run in the trainer's process: by default the judge, which queries a server and keeps a
    cache."""


class RewardConfig(Section):
    function: str = ""
    """package.module:function, path/to/file.py:function, or a module or file with a single function marked as a reward;
    "env" and "tools" use the rewards of the environment's steps and of the tools' calc_reward, "agent" what an agent of
    your own returned."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    parts: list[RewardPart] = Field(default_factory=list)
    """Several rewards instead of `function`: [[reward.parts]] tables with function, name, weight and kwargs."""
    combine: Literal["sum", "normalize"] = "sum"
    """Weighted sum of the parts as they are, or each normalized within its group first."""
    sandbox: SandboxConfig = SandboxConfig()
    max_error_rate: float = Field(default=0.2, ge=0.0, le=1.0)
    """Stop the run when more than this share of a step's rollouts could not be scored."""


class FaultsConfig(Section):
    """Error rates at which a run stops, with a checkpoint: docs/diagnosis.md. Each is a share of at least the last
    `window` rollouts or tool calls; 1 never stops. Reward errors have `reward.max_error_rate`."""

    policy: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts ended by a policy error: invalid token ids, an unreachable server."""
    env: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts ended by an environment error, or by a tool error in create or calc_reward."""
    deadline: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts that exceeded `rollout.deadline_s`."""
    infrastructure: float = Field(default=0.5, ge=0.0, le=1.0)
    """Rollouts in which something behind a tool was down: a server, a worker process."""
    tool: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tool calls that raised or timed out. Off by default: many tools fail often for good reasons."""
    parse: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tool calls that could not be parsed. Off by default: the model may still have to learn the format."""
    window: PositiveInt = 64
    """Minimum number of rollouts or calls a rate is computed over: those of the latest steps until there are this
    many."""


Aggregation = Literal["token", "step", "rollout", "constant"]
OptimizerState = Literal["fp32", "bf16", "cpu"]
Reaction = Literal["stop", "warn", "off"]


class LoraConfig(Section):
    """Train LoRA adapters instead of the full model. Needs pip install 'toolwise[peft]'."""

    rank: int = Field(default=0, ge=0)
    """0: no adapters, train the full model."""
    alpha: PositiveFloat = 32.0
    """LoRA scaling factor α."""
    target_modules: list[str] = Field(default_factory=list)
    """Names of the layers to adapt, such as q_proj; empty: all linear layers except the head."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, values: Any) -> Any:
        if isinstance(values, dict) and (names := {"dropout", "lora_dropout"} & values.keys()):
            raise ValueError(
                f"{min(names)} is not supported: the ratio of new to old probabilities would not be 1 before the first "
                "update; remove it"
            )
        return values

    @model_validator(mode="after")
    def _check_rank(self) -> LoraConfig:
        if self.target_modules and not self.rank:
            raise ValueError("target_modules is set but rank is 0, which trains the full model: set rank")
        return self


DEFAULT_PASS_TOKENS = 16_384
"""Tokens per forward and backward pass if nothing says otherwise."""


class ActorConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of warm-up."""
    schedule_steps: PositiveInt | None = None
    """Step at which a decaying learning rate reaches its minimum; unset: the end of the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum learning rate, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of the optimizer."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping norm."""
    optimizer_state: OptimizerState = "fp32"
    """AdamW's moments and master weights, also the critic's: "fp32"; "bf16" rounds the moments, which saves 4 bytes per
    trained parameter; "cpu" keeps and updates all of it in CPU memory, which saves 12 (8 with fp32 weights) and takes
    longer: docs/memory.md."""
    spike_factor: float = Field(default=20.0, ge=0.0)
    """Skip a step whose gradient norm exceeds max_grad_norm and this many times its running median; 0: never skip."""
    policy_loss: str = "ppo"
    """Loss of each token: "ppo", with the clip ratios below; a correction for stale tokens ("none", "tis", "decoupled",
    "interpolated", "icepop", "sequence_mask", "dppo", "cispo", "gspo"): docs/async.md; or one of your own as
    package.module:Name or path/to/file.py:Name: docs/algorithms.md."""
    policy_loss_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss of your own."""
    clip_ratio_low: PositiveFloat = 0.2
    """PPO clip range: ratios below 1 − clip_ratio_low are clipped."""
    clip_ratio_high: PositiveFloat = 0.2
    """Ratios above 1 + clip_ratio_high are clipped."""
    dual_clip: float = Field(default=3.0, ge=0.0)
    """Dual-clip PPO: a token with a negative advantage counts at most this many times its advantage, however much
    likelier it has become; 0: no bound."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the entropy bonus."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per epoch."""
    loss_aggregation: Aggregation = "token"
    """What gets equal weight: each token, each step, each rollout; "constant" divides all by loss_length."""
    loss_length: PositiveInt | None = None
    """Divisor under "constant" (Dr. GRPO): the maximum tokens of a rollout."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Reference of the PPO ratios: the log-probs recorded at sampling, or the learner's recomputed ones, with the ratio
    of the two as a bounded importance weight."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of that importance weight."""
    correction: CorrectionConfig = CorrectionConfig()
    micro_batch_tokens: PositiveInt | None = None
    """Tokens per forward and backward pass; affects speed and memory, never the result. Unset: 16,384, on a GPU up to
    65,536 if such a pass is estimated to take less than two fifths of its memory."""
    share_prefixes: bool = True
    """Compute prefixes shared by several rows once."""
    logit_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits are materialized at a time; unset: 1,024, on a GPU as many as fit in half a GiB."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    mismatch_check: Reaction = "stop"
    """Mismatch check: what to do when policy and learner disagree on the log-probs of the same tokens under the same
    weights."""
    lora: LoraConfig = LoraConfig()

    @property
    def pass_tokens(self) -> int:
        """`micro_batch_tokens`, or the default where no GPU allows more."""
        return self.micro_batch_tokens or DEFAULT_PASS_TOKENS

    @property
    def one_step(self) -> bool:
        """Whether each batch gets a single optimizer step: then the step's own log-probs are the old ones."""
        return self.ppo_epochs == self.mini_batches == 1


class CriticConfig(Section):
    """The value model, for estimators that need values (gae)."""

    path: str = ""
    """Model with the same tokenizer, for example a smaller one; empty: a copy of the policy."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of warm-up."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of the optimizer."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping norm."""
    value_clip: float = Field(default=0.2, ge=0.0)
    """Clip range of a value's change in one update; 0: no clipping."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per epoch."""


class ValidationConfig(Section):
    do_sample: bool = False
    """Sample tokens; false: decode greedily."""
    every: int = Field(default=0, ge=0)
    """Validate every `every` steps; 0: only before and after training."""
    before: bool = True
    """Validate before training."""


class RunConfig(Section):
    """One training run."""

    name: str = "run"
    """Name of the run and of its default folder."""
    seed: int = Field(default=0, ge=0)
    """Random seed."""
    deterministic: bool = False
    """One thread, and rollouts in lock step in a fixed order: the same run gives the same numbers again."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    tools: list[str | dict[str, Any]] = Field(default_factory=list)
    """Tools: built-in names, references, or tables {name = …, price = …, …}."""
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
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
    records: RecordsConfig = RecordsConfig()
    cluster: ClusterConfig = ClusterConfig()


INFERENCE_FIELDS: dict[str, Any] = {
    "model": {"template_kwargs"},
    "data": {"system_prompt"},
    "rollout": {
        "temperature": True,
        "max_new_tokens": True,
        "stop": True,
        "tool_parser": True,
        "tool_prompt": True,
        "grammar": {"regex", "tool_calls"},
        "on_template_change": True,
        "max_episode_tokens": True,
    },
    "multi_turn": {"enable", "max_turns", "tool_timeout_s", "max_result_chars", "max_invalid_in_a_row"},
}
"""Settings that a trained agent needs at inference: no paths, nothing specific to a machine or to training."""


def inference_settings(config: RunConfig) -> dict[str, Any]:
    """The `INFERENCE_FIELDS` of a configuration, stored beside an agent's weights; only the name of a user's parser."""
    settings = config.model_dump(mode="json", include=INFERENCE_FIELDS, exclude_none=True)
    settings["rollout"]["tool_parser"] = config.rollout.tool_parser.rpartition("/")[2]
    return settings


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a configuration from a TOML or YAML file and `a.b=c` overrides.

    Paths in the file are relative to the file, paths in overrides to the working directory.
    """
    settings = resolve_paths(read_settings(path), Path(path).resolve().parent)
    if settings.get("kind") == "sft":
        raise ConfigError(
            f"{path} is a configuration of `toolwise sft`, not of `toolwise train`: to use the model of an SFT run, "
            "name its folder as model.path"
        )
    return build_config(RunConfig, apply_overrides(settings, overrides), source=str(path))
