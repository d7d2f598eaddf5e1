"""From the `[agent]` section to an agent that can be rolled out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.rollout.agents.agent_request import OutsideAgent


def build_outside_agent(config: RunConfig) -> OutsideAgent | None:
    """The agent that the configuration names; None if it names none."""
    if not config.agent.enabled:
        return None
    from toolwise.rollout.agents.agent_pool import AgentPool
    from toolwise.rollout.agents.agent_request import OutsideAgent
    from toolwise.serve.gateway.gateway_server import Gateway

    return OutsideAgent(AgentPool(config.agent), Gateway())
