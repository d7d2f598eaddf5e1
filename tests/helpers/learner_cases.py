"""Tiny models and episodes sampled from them, for tests of the learner."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolwise.config.schema import RunConfig
from toolwise.learner.actor import Actor
from toolwise.learner.batch import build_batch
from toolwise.learner.packing import Packed, micro_batches
from toolwise.messages import Message
from toolwise.policies.transformers_generation import generate_batch
from toolwise.protocols import Sampling
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    Usage,
)

torch.set_num_threads(1)
PAD = 0


def changed(config: RunConfig, tables: Mapping[str, Any] | None = None, **actor: Any) -> RunConfig:
    """`config` with other options in `[actor]`, and in other `tables`."""
    values = config.model_dump()
    for name, options in {**(tables or {}), "actor": actor}.items():
        values[name] = {**values[name], **options} if isinstance(options, Mapping) else options
    return RunConfig.model_validate(values)


LR = changed(RunConfig(), lr=1e-2, mismatch_check="off")
"""With the mismatch check off, for tests that learn twice from the same rollouts."""


def tiny_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 48,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "pad_token_id": PAD,
            "eos_token_id": 1,
        }
        | changes
    )
    return LlamaForCausalLM(config).eval()


def credit(
    turns: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
    advantage: float,
    *,
    name: str = "r",
    group: str = "g",
    version: int | None = None,
) -> CreditedRollout:
    """A rollout of (prompt ids, sampled ids, log-probs) turns."""
    steps = tuple(
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={
                "prompt_ids": list(seen),
                "token_ids": list(ids),
                "logprobs": list(logprobs),
                **({} if version is None else {"policy_version": version}),
            },
        )
        for index, (seen, ids, logprobs) in enumerate(turns)
    )
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    rollout = Rollout(name, group, 0, 0, task, None, steps, task.prompt, StopReason.ANSWERED, Usage())
    advantages = tuple(np.full(len(ids), advantage, dtype=np.float32) for _, ids, _ in turns)
    return CreditedRollout(
        AnnotatedRollout(ScoredRollout(rollout, EvaluateResult(score=0.0), steps)), steps, advantages
    )


_generated: dict[tuple[object, ...], Any] = {}


def generate_once(model: Any, weights: bytes, seen: list[int], sampling: Sampling) -> Any:
    """What `model` samples; many tests sample the same from models of the same weights."""
    key = (weights, tuple(seen), sampling)
    if key not in _generated:
        [_generated[key]] = generate_batch(model, [seen], [sampling], pad_id=PAD, policy_version=0)
    return _generated[key]


def fingerprint(model: Any) -> bytes:
    """Of all that decides what a model samples."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def sample(
    model: Any,
    advantages: Sequence[float],
    *,
    seed: int = 0,
    temperature: float = 1.0,
    turns: int = 2,
    groups_of: int | None = None,
    version: int | None = None,
) -> list[CreditedRollout]:
    """Episodes of different lengths sampled from `model`, with other tokens between the turns; a group shares its
    prompt."""
    rng = np.random.default_rng(seed)
    weights = fingerprint(model)
    found = []
    for place, advantage in enumerate(advantages):
        group = place // (groups_of or 1)
        asked = np.random.default_rng([seed, group]) if groups_of else rng
        seen = asked.integers(2, 48, 3 + 5 * (group % 4)).tolist()
        said = []
        for turn in range(turns):
            sampling = Sampling(temperature, max_new_tokens=2 + place % 3, seed=100 * seed + 10 * place + turn)
            out = generate_once(model, weights, seen, sampling)
            said.append((seen, list(out.token_ids), list(out.logprobs)))
            seen = [*seen, *out.token_ids, *rng.integers(2, 48, 4).tolist()]
        name = f"g{group}" if groups_of else "g"
        found.append(credit(said, advantage, name=f"r{place}", group=name, version=version))
    return found


def pack(*rows_and_tokens: Any, **options: Any) -> list[Packed]:
    return list(micro_batches(*rows_and_tokens, **options))


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def gradients(actor: Actor, credited: Sequence[CreditedRollout]) -> tuple[torch.Tensor, float]:
    """The full gradient that one update accumulates, before clipping, and its loss."""
    found: dict[int, torch.Tensor] = {}

    def keep(place: int) -> Any:
        return lambda p: found.__setitem__(place, p.grad.detach().clone())

    hooks = [p.register_post_accumulate_grad_hook(keep(i)) for i, p in enumerate(actor.model.parameters())]
    metrics = actor.update(credited)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[i].flatten() for i in sorted(found)]), metrics["actor/loss"]


def drawn(credited: Sequence[CreditedRollout]) -> torch.Tensor:
    return torch.tensor([x for c in credited for s in c.steps for x in (s.policy_logprobs or {})["logprobs"]])


def current_logprobs(actor: Actor, rollouts: Sequence[CreditedRollout]) -> torch.Tensor:
    """Log-probs of all sampled tokens under the actor's current weights, in step order."""
    return actor._logprobs(actor.model, build_batch(rollouts, actor.device))
