"""The mean of heads and of λ is exact, and resumes from its state."""

from __future__ import annotations

import torch

from toolwise.routing.head.average import HeadAverage
from toolwise.routing.head.head import HeadSettings, RouterHead


def head(seed: int) -> RouterHead:
    made = RouterHead(HeadSettings(width=4, routes=("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"), hidden=5))
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


def test_it_is_the_mean_of_what_was_added() -> None:
    heads, average = [head(seed) for seed in range(5)], HeadAverage()
    for place, each in enumerate(heads):
        average.add(each, [float(place), 1.0])
    assert average.head is not None
    for name, mean in average.head.named_parameters():
        assert torch.allclose(mean, torch.stack([dict(h.named_parameters())[name] for h in heads]).mean(0), atol=1e-6)
    assert average.multipliers == [2.0, 1.0]


def test_until_something_is_added_it_is_what_is_given() -> None:
    average, own = HeadAverage(), head(0)
    assert average.of(own, [0.3]) == (own, [0.3])
    average.add(head(1), [0.5])
    assert average.of(own, [0.3])[1] == [0.5]
    average.reset()
    assert average.of(own, [0.3]) == (own, [0.3])


def test_added_heads_are_copied() -> None:
    average, own = HeadAverage(), head(0)
    kept = own.out.weight.detach().clone()
    average.add(own, [])
    with torch.no_grad():
        own.out.weight.add_(1.0)
    assert average.head is not None
    assert torch.equal(average.head.out.weight, kept)


def test_it_resumes_from_its_state() -> None:
    average, other = HeadAverage(), HeadAverage()
    other.load_state_dict({}, head(9))
    assert other.head is None
    for seed in range(2):
        average.add(head(seed), [0.5])
    other.load_state_dict(average.state_dict(), head(9))
    for each in (average, other):
        each.add(head(2), [0.2])
    assert average.head is not None
    assert other.head is not None
    assert all(torch.equal(a, b) for a, b in zip(average.head.parameters(), other.head.parameters(), strict=True))
    assert average.multipliers == other.multipliers
