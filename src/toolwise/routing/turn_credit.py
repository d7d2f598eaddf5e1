"""From the rewards and costs of routed turns to an advantage for each route that was chosen.

    G_t = Σ_{s ≥ t} r_s − Σ_u λ_u · Σ_{s ≥ t} c_{u,s}         what followed the choice at turn t, reward and cost
    A_t = G_t − mean of G over other rollouts of the prompt   in the same state, else at the same turn; else A_t = 0

The baseline leaves out the whole rollout, not only the turn: in a state that is visited twice, what follows the second
visit is a consequence of the first choice. Advantages are never divided by a standard deviation: where only the cost
differs, that would make them blind to λ. A choice without another one to compare with has an advantage of exactly 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """What followed the route of one turn."""

    prompt_id: str
    rollout_id: str
    turn: int
    state: Hashable
    """Equal for equal states of the same prompt; None matches no other."""
    reward: float
    """The sum of the rewards from this turn on."""
    costs: Mapping[str, float]
    """unit -> the sum of the costs from this turn on"""

    def net(self, lambdas: Mapping[str, float]) -> float:
        return self.reward - math.fsum(lam * self.costs[unit] for unit, lam in lambdas.items())


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """One entry per outcome."""

    advantages: tuple[float, ...]
    by_state: tuple[bool, ...]
    """Whether the baseline is that of the same state."""
    compared: tuple[bool, ...]
    """Whether there was anything to compare with."""


def credit_turns(outcomes: Sequence[TurnOutcome], lambdas: Mapping[str, float]) -> TurnAdvantages:
    nets = [outcome.net(lambdas) for outcome in outcomes]
    same_state, same_turn = defaultdict[Hashable, list[int]](list), defaultdict[Hashable, list[int]](list)
    for index, outcome in enumerate(outcomes):
        same_turn[outcome.prompt_id, outcome.turn].append(index)
        if outcome.state is not None:
            same_state[outcome.prompt_id, outcome.state].append(index)
    advantages, by_state, compared = [], [], []
    for index, outcome in enumerate(outcomes):

        def others(members: Sequence[int], rollout: str = outcome.rollout_id) -> list[int]:
            return [other for other in members if outcomes[other].rollout_id != rollout]

        peers = others(same_state.get((outcome.prompt_id, outcome.state), ()))
        by_state.append(bool(peers))
        peers = peers or others(same_turn[outcome.prompt_id, outcome.turn])
        compared.append(bool(peers))
        # Differences first: equal values give exactly 0, which a rounded mean would not.
        gaps = [nets[index] - nets[other] for other in peers]
        advantages.append(math.fsum(gaps) / len(gaps) if gaps else 0.0)
    return TurnAdvantages(tuple(advantages), tuple(by_state), tuple(compared))


def sums_to_go(values: Sequence[float]) -> list[float]:
    """For each entry the sum of it and all later ones."""
    return [math.fsum(values[index:]) for index in range(len(values))]
