"""The house as an environment: one sees the place one is in and acts in words, `<action>go left</action>`.

    toolwise check env toolwise.demo.rooms.env:RoomsEnv
    [env]    name = "toolwise.demo.rooms.env:RoomsEnv"
    [reward] function = "env"

The way out is worth 1, all else 0. A wrong door in a hall ends the walk; anything else that is wrong costs a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from toolwise.demo.rooms.house import COLOURS, SIDES, Place, Plan, build_house
from toolwise.envs.base import BaseEnv
from toolwise.rollout.parsers.action import parse_action

_WORDS = re.compile(
    rf"take map|go ({'|'.join(SIDES)})|(take|use) ({'|'.join(COLOURS)}) key|[1-9]", re.IGNORECASE | re.ASCII
)


class RoomsEnv(BaseEnv):
    """One walk through the house of number `house`; without it, through that of the group's seed.

    Both `rollout.tool_parser = "none"` and `"action"` will do: the action is found in the whole text too.
    """

    def __init__(self, house: int | None = None, plan: dict[str, int] | None = None, spare_turns: int = 2) -> None:
        self._plan = Plan(**(plan or {}))
        self._spare_turns = spare_turns
        self._fixed = house is not None
        self._enter(0 if house is None else house)

    def set_seed(self, seed: int) -> None:
        if not self._fixed:
            self._enter(seed)

    @property
    def state_key(self) -> str:
        return f"house {self.number}, {self._over or f'place {self.at}'}"

    @property
    def place(self) -> Place | None:
        """Where one is; None outside."""
        return self.house.places[self.at] if self.at < len(self.house.places) else None

    async def reset(self) -> str:
        self.at, self.turns, self._over = 0, 0, ""
        return self.house.places[0].sight

    async def step(self, action: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        """`step_kind` says whether the step was easy or hard, and `optimal` whether it was the right one: for
        metrics, not for the agent."""
        place = self.place
        if self._over or place is None:
            return "The walk is over.", 0.0, True, {"is_action_valid": False, "truncated": self._over == "late"}
        self.turns += 1
        words = " ".join(parse_action(action)[0].lower().split())
        right = words == place.action
        valid = _WORDS.fullmatch(words) is not None
        told = self._go_on() if right else self._stay(place, words, valid)
        if not self._over and self.turns >= len(self.house.places) + self._spare_turns:
            self._over = "late"
        info = {
            "is_action_valid": valid,
            "success": self._over == "out",
            "truncated": self._over == "late",
            "step_kind": "hard" if place.hard else "easy",
            "optimal": right,
        }
        return told, float(self._over == "out"), bool(self._over), info

    def gold_actions(self) -> list[str]:
        return [f"<action>{action}</action>" for action in self.house.gold_actions]

    def example_actions(self) -> Sequence[str]:
        return (self.gold_actions()[0], "<action>go left</action>", "<action>7</action>")

    def _enter(self, number: int) -> None:
        self.number = number
        self.house = build_house(number, self._plan)
        self.at, self.turns, self._over = 0, 0, ""

    def _go_on(self) -> str:
        shown = f"{self.house.map_text} " if self.house.places[self.at].kind == "map" else ""
        self.at += 1
        if self.place is None:
            self._over = "out"
            return f"{shown}You are out."
        return shown + self.place.sight

    def _stay(self, place: Place, words: str, valid: bool) -> str:
        if place.hard and words.isdigit() and valid:
            self._over = "fallen"
            return "The floor gives way."
        return f"{'Nothing happens.' if valid else 'You cannot do that.'} {place.sight}"
