"""Tiny models of several families, engines whose blocks are counted after every step, and what must come out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar
from unittest import mock

import torch
from block_checks import check_engine
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from toolwise.engine import Engine
from toolwise.engine.cpu_forward import CpuForward
from toolwise.models import load_model
from toolwise.protocols import Generation, Sampling

torch.set_num_threads(1)
T = TypeVar("T")
VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
LONG_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
FAMILIES = ["builtin", "llama", "llama-rope", "qwen2", "qwen3"]


@cache
def shipped() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


@contextmanager
def before_forward(model: Any, look: Callable[[Any], None]) -> Iterator[None]:
    """`look` receives the token ids [rows, tokens] before every forward pass: of the model's own modules, and of the
    lean pass that calls their parameters."""
    lean = CpuForward.forward

    def looked(self: CpuForward, ids: Any, *args: Any, **more: Any) -> Any:
        look(ids[None])
        return lean(self, ids, *args, **more)

    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: look(kwargs["input_ids"]), with_kwargs=True
    )
    try:
        with mock.patch.object(CpuForward, "forward", looked):
            yield
    finally:
        handle.remove()


def tiny(family: str = "llama", seed: int = 0, **more: Any) -> Any:
    """A random model; `builtin` is the one that ships."""
    torch.manual_seed(seed)
    if family == "builtin":
        return shipped()[0]
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True, **more))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=16, **more))
    elif family == "llama-rope":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4, rope_parameters=LONG_ROPE, **more))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, **more))
    return model.eval()


def counted(model: Any, **settings: Any) -> Engine:
    """An engine that looks at every block after every step."""
    engine = Engine(model, **{"block_size": 4, "blocks": 256, **settings})
    step = engine.step

    def checked() -> None:
        step()
        check_engine(engine)

    engine.step = checked  # type: ignore[method-assign]
    return engine


def run(work: Coroutine[Any, Any, T], limit_s: float = 60) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, limit_s)

    return asyncio.run(limited())


def greedily(model: Any, new: int) -> Sampling:
    """Ends where transformers would end."""
    end = model.config.eos_token_id
    return Sampling(max_new_tokens=new, do_sample=False, stop_token_ids=() if end is None else (end,))


def random_ids(length: int, seed: int) -> list[int]:
    drawn = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    ids: list[int] = drawn.tolist()
    return ids


def generate_all(
    engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], **more: Any
) -> list[Generation]:
    async def ask() -> list[Generation]:
        pairs = zip(prompts, samplings, strict=True)
        return list(await asyncio.gather(*(engine.generate(p, s, **more) for p, s in pairs)))

    return run(ask())


@torch.inference_mode()
def forced(model: Any, ids: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs over the vocabulary at each place of `tokens`, from one pass over everything."""
    logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


_references: dict[tuple[bytes, tuple[int, ...], int], list[int]] = {}


def reference(model: Any, ids: Sequence[int], new: int) -> list[int]:
    """What transformers.generate says, greedily; asked once for the same weights and the same prompt."""
    key = (_digest(model), tuple(ids), new)
    if key not in _references:
        given = torch.tensor([list(ids)])
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        _references[key] = out[0, len(ids) :].tolist()
    return list(_references[key])


def _digest(model: Any) -> bytes:
    """Equal only for models of one configuration whose weights are the same to the bit."""
    seen = hashlib.blake2b(f"{type(model)} {model.config.to_json_string(use_diff=False)}".encode(), digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        seen.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return seen.digest()


def assert_greedy(model: Any, ids: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> None:
    """Equal, or different first where the two likeliest tokens are a hair's breadth apart."""
    place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if place is None:
        assert len(found) == len(expected)
        return
    best = forced(model, ids, list(expected[: place + 1]))[place].topk(2).values
    assert float(best[0] - best[1]) < 1e-4, f"token {place} is another"


def assert_forced(model: Any, ids: Sequence[int], result: Generation, temperature: float = 1.0) -> None:
    tokens = list(result.token_ids)
    expected = forced(model, ids, tokens, temperature)[range(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(list(result.logprobs)), expected, atol=1e-4, rtol=0)
