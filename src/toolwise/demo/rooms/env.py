"""The house as an environment: the agent sees its current room and acts in text, `<action>go left</action>`.

    toolwise check env toolwise.demo.rooms.env:RoomsEnv
    [env]    name = "toolwise.demo.rooms.env:RoomsEnv"
    [reward] function = "env"

Reaching the exit earns 1, all else 0. A wrong door in a hall ends the walk; any other wrong action costs a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolwise.demo.rooms.house import COLOURS, SIDES, HouseConfig, Room, build_house
from toolwise.envs.base import BaseEnv
from toolwise.rollout.parsers.action import parse_action

_VALID_ACTION = re.compile(
    rf"take map|go ({'|'.join(SIDES)})|(take|use) ({'|'.join(COLOURS)}) key|[1-9]", re.IGNORECASE | re.ASCII
)


MAX_NEW_TOKENS = 64
"""Twice the longest thought in the SFT data; longer ones are cut off."""


class RoomsEnv(BaseEnv):
    """One walk through house number `house`, by default the number given by the group's seed.

    Works with `rollout.tool_parser = "none"` and `"action"`: the environment also finds the action in the whole text.
    """

    def __init__(self, house: int | None = None, plan: dict[str, int] | None = None, spare_turns: int = 2) -> None:
        self._plan = HouseConfig(**(plan or {}))
        self._spare_turns = spare_turns
        self._fixed = house is not None
        self._enter(0 if house is None else house)

    def set_seed(self, seed: int) -> None:
        if not self._fixed:
            self._enter(seed)

    @property
    def state_key(self) -> str:
        return f"house {self.number}, {self._outcome or f'place {self.position}'}"

    @property
    def room(self) -> Room | None:
        """The current room; None outside."""
        return self.house.rooms[self.position] if self.position < len(self.house.rooms) else None

    async def reset(self) -> str:
        self.position, self.turns, self._outcome = 0, 0, ""
        return self.house.rooms[0].observation

    async def step(self, action: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        """`info` has `step_kind` (easy or hard) and `optimal` (is the action right) for metrics, not for the agent."""
        room = self.room
        if self._outcome or room is None:
            return "The walk is over.", 0.0, True, {"is_action_valid": False, "truncated": self._outcome == "late"}
        self.turns += 1
        words = " ".join(parse_action(action)[0].lower().split())
        right = words == room.action
        valid = _VALID_ACTION.fullmatch(words) is not None
        observation = self._advance() if right else self._stay(room, words, valid)
        if not self._outcome and self.turns >= len(self.house.rooms) + self._spare_turns:
            self._outcome = "late"
        info = {
            "is_action_valid": valid,
            "success": self._outcome == "out",
            "truncated": self._outcome == "late",
            "step_kind": "hard" if room.hard else "easy",
            "optimal": right,
        }
        return observation, float(self._outcome == "out"), bool(self._outcome), info

    def gold_actions(self) -> list[str]:
        return [f"<action>{room.action}</action>" for room in self.house.rooms]

    def example_actions(self) -> Sequence[str]:
        return (self.gold_actions()[0], "<action>go left</action>", "<action>7</action>")

    def _enter(self, number: int) -> None:
        self.number = number
        self.house = build_house(number, self._plan)
        self.position, self.turns, self._outcome = 0, 0, ""

    def _advance(self) -> str:
        shown = f"{self.house.map_text} " if self.house.rooms[self.position].kind == "map" else ""
        self.position += 1
        if self.room is None:
            self._outcome = "out"
            return f"{shown}You are out."
        return shown + self.room.observation

    def _stay(self, room: Room, words: str, valid: bool) -> str:
        if room.hard and words.isdigit() and valid:
            self._outcome = "fallen"
            return "The floor gives way."
        return f"{'Nothing happens.' if valid else 'You cannot do that.'} {room.observation}"


def rooms_config(model: str | Path, tasks: Path | None = None, *, seed: int = 0) -> dict[str, Any]:
    """A configuration for the environment; callers add the settings of an estimator.

    `tasks` is a folder with train.jsonl and heldout.jsonl (`toolwise.demo.rooms.demonstrations`); without it the caller
    passes tasks itself. The environment parses `<action>`, so the conversation keeps the full text of each reply.
    """
    data = {"train": str(tasks / "train.jsonl"), "val": str(tasks / "heldout.jsonl")} if tasks else {}
    return {
        "name": "rooms",
        "seed": seed,
        "model": {"path": str(model)},
        "data": {**data, "batch_size": 8},
        "env": {"name": "toolwise.demo.rooms.env:RoomsEnv"},
        "rollout": {"n": 16, "max_new_tokens": MAX_NEW_TOKENS, "tool_parser": "none"},
        "multi_turn": {"max_turns": 8, "max_invalid_in_a_row": 3},
        "reward": {"function": "env"},
        "actor": {"lr": 1e-4, "warmup_steps": 3},
        "validation": {"do_sample": True},
        "trainer": {"total_steps": 80, "console": False},
    }
