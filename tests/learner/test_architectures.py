"""Each published architecture learns as in transformers: packed rows give the log-probs and gradients of plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, LONG, build
from learner_cases import pack
from selection import quick_first
from torch import Tensor
from torch.overrides import TorchFunctionMode

from toolwise.errors import ModelError
from toolwise.learner.forward import can_share_prefixes, hidden_states, token_logprobs

torch.set_num_threads(1)
Result = tuple[dict[tuple[int, int], Tensor], dict[str, Tensor]]
"""Log-prob and entropy of each sampled token, by row and position, and the gradients."""


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    sampled: list[bool]


class DoubleThroughout(TorchFunctionMode):
    """Casts of float64 to float32, which norms and softmaxes of most models contain, do nothing: the rounding that is
    left is that of float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return function(*args, **kwargs)


def forked_rows(prompt_length: int = 11) -> list[Tokens]:
    """Two prompts with replies of unequal lengths, some of which fork within the reply; longer than the windows."""
    draw = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(1, 97, (count,), generator=draw).tolist()

    rows = []
    for length in (prompt_length, 2):
        prompt, reply = some(length), some(4)
        rows += [
            Tokens([*prompt, *reply, *tail], [False] * length + [True] * (4 + len(tail)))
            for tail in (some(1), some(7), some(3))
        ]
    return rows


def loss_of(logprobs: Tensor, entropy: Tensor, row: int, position: int) -> Tensor:
    weight = (7 * row + 3 * position) % 5 - 1.7
    return weight * logprobs + 0.1 * (weight + 1.0) * entropy


def by_transformers(model: Any, rows: list[Tokens]) -> Result:
    model.zero_grad()
    found: dict[tuple[int, int], Tensor] = {}
    for n, row in enumerate(rows):
        logp = torch.log_softmax(model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0], -1)
        terms = {}
        for at in (at for at in range(1, len(row.ids)) if row.sampled[at]):
            before = logp[at - 1]
            terms[n, at] = before[row.ids[at]], -(before.exp() * before).sum()
        torch.stack([loss_of(*term, *place) for place, term in terms.items()]).sum().backward()
        found |= {place: torch.stack(term).detach() for place, term in terms.items()}
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_us(model: Any, rows: list[Tokens], budget: int) -> Result:
    model.zero_grad()
    found: dict[tuple[int, int], Tensor] = {}
    for packed in pack(rows, budget, share_prefixes=can_share_prefixes(model)):
        terms = token_logprobs(model, hidden_states(model, packed), packed, 1.0)
        places = list(zip(packed.row.tolist(), packed.at.tolist(), strict=True))
        pairs = list(zip(places, *terms, strict=True))
        torch.stack([loss_of(logprob, entropy, *place) for place, logprob, entropy in pairs]).sum().backward()
        found |= {place: torch.stack([logprob, entropy]).detach() for place, logprob, entropy in pairs}
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: Result, theirs: Result, tolerance: float) -> None:
    places = sorted(theirs[0])
    assert sorted(ours[0]) == places
    values, expected = (torch.stack([found[place] for place in places]) for found in (ours[0], theirs[0]))
    torch.testing.assert_close(values, expected, atol=tolerance, rtol=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    apart = torch.stack([(ours[1][name] - gradient).norm() for name, gradient in theirs[1].items()]).norm()
    assert float(apart) <= tolerance * float(torch.stack([gradient.norm() for gradient in theirs[1].values()]).norm())


TRAINED = [name for name, architecture in ARCHITECTURES.items() if architecture.trains]


@pytest.mark.parametrize("name", quick_first(TRAINED, TRAINED[::3]))
def test_in_float64_log_probs_and_gradients_are_those_of_plain_rows(name: str) -> None:
    model = build(name, torch.float64)
    assert can_share_prefixes(model) == ARCHITECTURES[name].packed
    rows = forked_rows()
    with DoubleThroughout():
        expected = by_transformers(model, rows)
        for budget in (500, 25):
            assert_same(by_us(model, rows, budget), expected, 1e-9)


# That the formulas are the same is told by float64.
@pytest.mark.parametrize("name", quick_first(TRAINED, ("llama", "gemma2", "gpt2", "qwen3, moe", "gpt-oss", "phi3")))
def test_in_float32_log_probs_and_gradients_are_those_of_plain_rows(name: str) -> None:
    model, rows = build(name), forked_rows()
    assert_same(by_us(model, rows, 500), by_transformers(model, rows), 1e-5)


def test_a_model_whose_hidden_states_cannot_be_read_is_refused() -> None:
    with pytest.raises(ModelError, match="get_decoder"):
        by_us(build("llama4"), forked_rows(), 500)


def test_a_model_that_changes_its_logits_otherwise_is_refused() -> None:
    model, head = build("llama"), torch.nn.Linear(48, 97, bias=False)
    model.get_output_embeddings = lambda: head
    with pytest.raises(ModelError, match="changes the logits of its head"):
        by_us(model, forked_rows(), 500)


def test_rows_beyond_the_length_of_a_longrope_have_its_other_angles() -> None:
    """A micro-batch may hold rows on both sides of the limit; a row that shares tokens may not be beyond it."""
    model, rows = build("phi3, longrope", torch.float64), forked_rows(LONG["original_max_position_embeddings"] - 9)
    assert max(len(row.ids) for row in rows) > LONG["original_max_position_embeddings"] - 5
    long = [Tokens([*row.ids, 5, 6], [*row.sampled, True, True]) for row in forked_rows(60)]
    for some in (rows, long):
        ids = {tuple(row.ids): row for row in some}
        plain = list(ids.values())
        expected = by_transformers(model, plain)
        model.zero_grad()
        found: dict[tuple[int, int], Tensor] = {}
        for packed in pack(plain, 500, share_prefixes=False):
            logprobs, _ = token_logprobs(model, hidden_states(model, packed), packed, 1.0)
            places = zip(packed.row.tolist(), packed.at.tolist(), strict=True)
            found |= dict(zip(places, logprobs.detach(), strict=True))
        for place, value in found.items():
            assert float(value) == pytest.approx(float(expected[0][place][0]), abs=1e-5)
    with pytest.raises(ModelError, match="share_prefixes = false"):
        by_us(model, long, 500)
