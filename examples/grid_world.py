"""An example environment: a small grid with walls, observed and walked in words. Reaching the goal earns 1.

    toolwise check env examples/grid_world.py:GridEnv

In a configuration:

    [env]
    name = "examples/grid_world.py:GridEnv"
    kwargs = { size = 5, max_turns = 12 }

    [reward]
    function = "env"

Many rollouts pass through the same cells, named by `state_key`, so step-level credit (`adv_estimator = "gigpo"`) can
compare their steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from toolwise.envs.base import BaseEnv

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


class Grid:
    """The floor plan. `layout` seeds the walls, a share `walls` of the cells; all free cells stay connected."""

    def __init__(self, layout: int, size: int, walls: float) -> None:
        cells = [(x, y) for x in range(size) for y in range(size)]
        order = list(cells)
        Random(f"walls/{layout}").shuffle(order)
        self.floor = set(cells)
        wanted = len(cells) - round(walls * len(cells))
        for cell in order:
            if len(self.floor) == wanted:
                break
            left = self.floor - {cell}
            if len(self._distances(next(iter(left)), left)) == len(left):
                self.floor = left
        self.free = sorted(self.floor)

    def after(self, cell: Cell, move: str) -> Cell:
        """The cell after a move; a move into a wall changes nothing."""
        x, y = MOVES[move]
        there = (cell[0] + x, cell[1] + y)
        return there if there in self.floor else cell

    def distances(self, goal: Cell) -> dict[Cell, int]:
        """Number of moves from each cell to the goal."""
        return self._distances(goal, self.floor)

    def good_moves(self, cell: Cell, goal: Cell) -> list[str]:
        """Moves that bring the agent closer to the goal."""
        far = self.distances(goal)
        return [move for move in MOVES if far[self.after(cell, move)] < far[cell]]

    @staticmethod
    def _distances(start: Cell, floor: set[Cell]) -> dict[Cell, int]:
        found = {start: 0}
        waiting = deque([start])
        while waiting:
            x, y = cell = waiting.popleft()
            for dx, dy in MOVES.values():
                there = (x + dx, y + dy)
                if there in floor and there not in found:
                    found[there] = found[cell] + 1
                    waiting.append(there)
        return found


@cache
def grid_of(layout: int, size: int, walls: float) -> Grid:
    """Shared by all episodes; a grid never changes."""
    return Grid(layout, size, walls)


class GridEnv(BaseEnv):
    """One walk. `layout` seeds the walls; `episode`, or else the group's seed, selects start and goal. `goals` limits
    the number of cells that can be the goal. A word that is not a move is refused and costs a turn; with
    `strict=False` every word maps to some move."""

    def __init__(
        self,
        layout: int = 0,
        episode: int | None = None,
        size: int = 5,
        walls: float = 0.2,
        goals: int | None = None,
        least_distance: int = 2,
        max_turns: int = 12,
        strict: bool = True,
    ) -> None:
        self.grid = grid_of(layout, size, walls)
        self.max_turns = max_turns
        self._goals = Random(f"goals/{layout}").sample(self.grid.free, goals or len(self.grid.free))
        self._least_distance = least_distance
        self._strict = strict
        self._draw(0 if episode is None else episode)
        self._fixed = episode is not None

    def set_seed(self, seed: int) -> None:
        if not self._fixed:
            self._draw(seed)

    @property
    def state_key(self) -> str:
        return "x{} y{}".format(*self.at)

    async def reset(self) -> str:
        self.at, self.turns, self._over = self.start, 0, ""
        return self.sight()

    async def step(self, action: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        if self._over:
            told = {"is_action_valid": False, "truncated": self._over == "truncated"}
            return "the walk is over", 0.0, True, told
        self.turns += 1
        move = self.heard(action)
        if move is not None:
            self.at = self.grid.after(self.at, move)
        there = self.at == self.goal
        late = not there and self.turns >= self.max_turns
        self._over = "there" if there else "truncated" if late else ""
        info = {"is_action_valid": move is not None, "success": there, "truncated": late}
        seen = self.refusal(self.turns) if move is None else self.sight()
        return seen, float(there), bool(self._over), info

    def heard(self, action: str) -> str | None:
        """The move in a text: its first word. None if that is not a move."""
        word = next(iter(action.lower().split()), "")
        if word in MOVES or not self._strict:
            return word if word in MOVES else list(MOVES)[sum(map(ord, word)) % len(MOVES)]
        return None

    def gold_actions(self) -> list[str]:
        """A shortest path."""
        at, way = self.start, []
        while at != self.goal:
            way.append(self.grid.good_moves(at, self.goal)[0])
            at = self.grid.after(at, way[-1])
        return way

    def example_actions(self) -> Sequence[str]:
        return tuple(MOVES)

    def sight(self) -> str:
        """The full observation: position and goal."""
        return "at x{} y{} goal x{} y{}".format(*self.at, *self.goal)

    def refusal(self, turn: int) -> str:
        """The observation after a text that is not a move."""
        return f"turn {turn} : say one of {' '.join(MOVES)} : {self.sight()}"

    def _draw(self, seed: int) -> None:
        """Selects start and goal, at least `least_distance` moves apart if the grid allows it."""
        random = Random(f"walk/{seed}")
        self.goal = random.choice(self._goals)
        far = self.grid.distances(self.goal)
        least = min(self._least_distance, max(far.values()))
        self.start = random.choice([cell for cell in self.grid.free if far[cell] >= least])
        self.at, self.turns, self._over = self.start, 0, ""


def make_rows(episodes: Sequence[int], **env_kwargs: Any) -> list[dict[str, Any]]:
    """Tasks as dataset rows, one per episode."""
    return [
        {
            "task_id": f"walk-{episode}",
            "prompt": [{"role": "system", "content": f"Reach the goal. Say one of {' '.join(MOVES)}."}],
            "extra_info": {"env_kwargs": {**env_kwargs, "episode": episode}},
        }
        for episode in episodes
    ]
