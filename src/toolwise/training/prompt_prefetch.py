"""Work on the prompts of the next step: they are rendered and tokenized while the model generates and the event loop is
idle, and read by a router once the weights are those of the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from toolwise.data import Batches
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ToolwiseError
from toolwise.policies.local import LocalPolicy
from toolwise.rollout.chat_tokenizer import ENCODE_CACHE_SIZE
from toolwise.routing.learned_router import LearnedRouter
from toolwise.routing.routers import DirectRouter
from toolwise.training.run import Run
from toolwise.types import Task

FIRST_PAUSE_S, PAUSE_S = 0.1, 0.005
"""Before the first prompt, so that the rollouts of this step begin first, and before each further one."""


async def prefetch_prompts(run: Run) -> None:
    """Tokenize the prompts of the next batch where they are known before the step, and plan how a router reads them."""
    prepare = _preparation(run)
    if prepare is None or not isinstance(run.batches, Batches):
        return
    await asyncio.sleep(FIRST_PAUSE_S)
    with suppress(ToolwiseError):  # a task that cannot be read: the next step will say so
        for task in islice(run.batches.upcoming(), ENCODE_CACHE_SIZE // 2):
            if task.prompt_ids is None:
                with suppress(ToolwiseError):  # the next step, or its rollouts, will say so
                    prepare(task)
            await asyncio.sleep(PAUSE_S)
        if isinstance(run.router, LearnedRouter) and isinstance(run.policy, LocalPolicy):
            run.router.plan_ahead()


def read_next_prompts(run: Run) -> None:
    """Once the actor has been updated: let the router begin to read the prompts that were planned."""
    if isinstance(run.router, LearnedRouter) and isinstance(run.policy, LocalPolicy):
        run.router.read_ahead()


def _preparation(run: Run) -> Callable[[Task], object] | None:
    """What can be done for a task beforehand: a router reads its prompt as it is; without one it is put into the
    tokenizer's caches, unless an environment, an outside agent or a user's router may change it."""
    scheduler, policy = run.scheduler, run.policy
    if isinstance(run.router, LearnedRouter) and not scheduler.lock_step:
        return run.router.prepare
    plain = run.agent is None and scheduler.make_env is None and not scheduler.lock_step
    if not (plain and isinstance(run.router, DirectRouter) and isinstance(policy, LocalPolicy)):
        return None
    chat = policy.chat
    return lambda task: chat.start(task.prompt, ToolEnv(task, scheduler.tools).tool_specs())
