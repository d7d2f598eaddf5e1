"""`keeps_deadlines` is not inherited by a subclass that overrides the methods it is about."""

from __future__ import annotations

from toolwise.envs.base import BaseEnv
from toolwise.envs.methods_env import MethodsEnv
from toolwise.envs.tool_env import ToolEnv


def test_a_subclass_that_overrides_close_does_not_keep_deadlines() -> None:
    class Closing(ToolEnv):
        async def close(self) -> None:
            return

    class Same(ToolEnv):
        pass

    class Promising(ToolEnv):
        keeps_deadlines = True

        async def close(self) -> None:
            return

    assert not BaseEnv.keeps_deadlines
    assert ToolEnv.keeps_deadlines
    assert not Closing.keeps_deadlines
    assert Same.keeps_deadlines
    assert Promising.keeps_deadlines
    assert not MethodsEnv.keeps_deadlines
