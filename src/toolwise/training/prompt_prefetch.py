"""Renders and tokenizes the prompts of the next step while the model generates and the event loop is idle."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import islice

from toolwise.data import Batches
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ToolwiseError
from toolwise.policies.local import LocalPolicy
from toolwise.rollout.chat_tokenizer import ENCODE_CACHE_SIZE
from toolwise.routing.routers import DirectRouter
from toolwise.training.run import Run

FIRST_PAUSE_S, PAUSE_S = 0.1, 0.005
"""Before the first prompt, so that the rollouts of this step begin first, and before each further one."""


async def prefetch_prompts(run: Run) -> None:
    """Put the prompts of the next batch into the tokenizer's caches. Only where they are known before the step: a
    router, an environment, an outside agent or a sampler may change them."""
    scheduler, policy = run.scheduler, run.policy
    plain = run.agent is None and scheduler.make_env is None and not scheduler.lock_step
    known = plain and isinstance(run.router, DirectRouter)
    if not known or not isinstance(policy, LocalPolicy) or not isinstance(run.batches, Batches):
        return
    await asyncio.sleep(FIRST_PAUSE_S)
    with suppress(ToolwiseError):  # a task that cannot be read: the next step will say so
        for task in islice(run.batches.upcoming(), ENCODE_CACHE_SIZE // 2):
            if task.prompt_ids is None:
                with suppress(ToolwiseError):  # its rollouts will say so
                    policy.chat.start(task.prompt, ToolEnv(task, scheduler.tools).tool_specs())
            await asyncio.sleep(PAUSE_S)
