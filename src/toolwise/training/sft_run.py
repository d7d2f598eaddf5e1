"""`SftRun`: the parts of a supervised fine-tuning run, and how they are built from its configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.threads import configure_threads, set_thread_count
from toolwise.config.sft import SftConfig
from toolwise.errors import CheckpointError, ConfigError, ModelError
from toolwise.training.changes import Change
from toolwise.training.checkpoint import Checkpoint, RngState, StateRegistry
from toolwise.training.model_check import check_dtype
from toolwise.training.sft_data import Conversation, Rows, TokenizedSplit, fingerprint, read_conversations, tokenize
from toolwise.training.startup import announce

if TYPE_CHECKING:
    from toolwise.learner.conversations import Example
    from toolwise.learner.supervised import EpochBatches, SftBatch, SftLearner
    from toolwise.rollout.chat_tokenizer import ChatTokenizer

log = logging.getLogger("toolwise.training")


@dataclass(slots=True)
class SftProgress:
    """The progress of a run; saved in checkpoints."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Tokens of the conversations seen so far, repetitions included."""
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    """Metrics of the first and of the latest step."""
    before: float | None = None
    """Validation loss before training."""
    validation: float | None = None
    """The latest validation loss."""
    validated: int = -1
    """The step of it."""
    best: float | None = None
    """The lowest validation loss."""
    best_step: int = -1
    not_finite: int = 0
    """Steps whose loss was not a finite number."""
    not_finite_in_a_row: int = 0
    updated: bool = False
    """Whether any update has changed the weights."""
    fingerprint: str = ""
    """Of the conversations; checkpoints of earlier versions have none."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("fingerprint", self.fingerprint) != self.fingerprint:
            raise CheckpointError(
                "the checkpoint was made with other data: the conversations have changed, and those it was trained on "
                "may now be held out; restore the file, or start a new run with another --out"
            )
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class SftRun:
    config: SftConfig
    """As recorded in config.toml, but with the number of steps that `epochs` stands for."""
    chat: ChatTokenizer
    learner: SftLearner
    train: TokenizedSplit
    val: TokenizedSplit
    batches: EpochBatches
    progress: SftProgress = field(default_factory=SftProgress)

    def pack(self, step: int) -> SftBatch:
        """The batch of a step, counted from 0."""
        return self.learner.pack([self.train.rows[index] for index in self.batches[step]])

    def restore(self, saved: Checkpoint, changes: Sequence[Change]) -> None:
        """Load a checkpoint; settings that have changed since need nothing more."""
        self.registry().load_state_dict(saved.state())  # first: it refuses other data
        self.learner.load_weights(saved.path / "model")

    def registry(self) -> StateRegistry:
        """All state that must survive a crash. Which conversations a step sees depends on its number alone."""
        return StateRegistry({"learner": self.learner, "progress": self.progress, "randomness": RngState()})


def check_sft(config: SftConfig, *, has_val: bool) -> None:
    if config.trainer.keep_best and not has_val:
        raise ConfigError("trainer.keep_best needs held-out conversations: set data.val or data.val_fraction")
    if config.val_every and not has_val:
        raise ConfigError("val_every needs held-out conversations: set data.val or data.val_fraction")


def assemble_sft(config: SftConfig, rows: Rows | None = None, val: Rows | None = None) -> SftRun:
    """Build the run; `rows` and `val` replace the configured files. All errors in the input are found here."""
    check_sft(config, has_val=config.validates or val is not None)
    announce("reading the conversations")
    train, held_out = read_conversations(config, rows, val)
    model, chat = _load(config)
    announce(f"tokenizing {len(train) + len(held_out):,} conversations")
    tokenized, tokenized_val = _tokenize(config, chat, train, "training"), _tokenize(config, chat, held_out, "held-out")
    _check_fit(model, chat, [*tokenized.rows, *tokenized_val.rows])
    announce("building the learner")
    from toolwise.learner.supervised import EpochBatches, SftLearner

    batches = EpochBatches([len(row) for row in tokenized.rows], config.batch_tokens, config.seed)
    if config.epochs is not None:
        config = config.model_copy(update={"steps": math.ceil(config.epochs * len(batches))})
    progress = SftProgress(fingerprint=fingerprint(train, held_out))
    return SftRun(config, chat, SftLearner(model, config), tokenized, tokenized_val, batches, progress)


def _load(config: SftConfig) -> tuple[Any, ChatTokenizer]:
    from toolwise.models import load_model, locate

    settings = config.model
    locate(settings.path, settings.revision)  # a missing model is reported without importing torch
    announce("importing PyTorch")
    configure_threads(config)
    from toolwise.models.loader import resolve_device

    check_dtype(config, resolve_device(settings.device))
    announce(f"loading the model {settings.path}")
    model, chat = load_model(
        settings.path,
        device=settings.device,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
        revision=settings.revision,
        chat_template=settings.chat_template,
        template_kwargs=settings.template_kwargs,
    )
    set_thread_count(config, model)
    chat.set_tool_prompt(config.rollout.tool_prompt, config.rollout.tool_parser)
    return model, chat


def _tokenize(
    config: SftConfig, chat: ChatTokenizer, conversations: Sequence[Conversation], name: str
) -> TokenizedSplit:
    split = tokenize(config, chat, conversations)
    if (text := split.describe_long(config.row_tokens)) is not None:
        log.warning("%s data: %s", name, text)
    prompt = chat.tool_prompt
    if any(c.tools for c in conversations) and (prompt.where == "nowhere" or not prompt.usable):
        log.warning("%s", prompt.describe())
    return split


def _check_fit(model: Any, chat: ChatTokenizer, rows: Sequence[Example]) -> None:
    embedded = model.get_input_embeddings().weight.shape[0]
    if (largest := max(int(row.ids.max()) for row in rows)) >= embedded:
        raise ModelError(
            f"the tokenizer of {chat.name} has the token id {largest}, the model's embeddings only {embedded}: use the "
            "tokenizer the model was trained with, or resize its embeddings and save it"
        )
    context = getattr(model.config, "max_position_embeddings", 0) or 0
    if context and (longest := max(map(len, rows))) > context:
        raise ConfigError(
            f"row_tokens: a conversation has {longest} tokens, the model's context is {context}: set it to {context} "
            "or less"
        )
