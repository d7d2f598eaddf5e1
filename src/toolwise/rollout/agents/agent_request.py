"""One rollout of an outside agent: gives it a session, runs it until its deadline, and ends exactly once.

A sibling of `rollout/request.py`. Whatever the agent does becomes a stop reason:

    returns                                      answered, or what cut its last reply
    raises after a limit of its session          max_steps, max_tokens or prompt_too_long
    raises                                       env_fault: not trained on; an agent that wants the policy to learn from
                                                 such an ending catches the exception and returns
    raises after a call failed in our engine     policy_fault
    makes no call of the model                   env_fault
    hangs                                        deadline: its process is killed
    dies                                         env_fault and an infrastructure fault
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolwise.concurrency.deadlines import WorkClock, run_with_deadline
from toolwise.errors import ToolwiseError
from toolwise.rewards.results import read_result
from toolwise.rollout.agents.agent_pool import AgentPool
from toolwise.rollout.agents.agent_process import AgentDiedError, AgentFaultError
from toolwise.rollout.agents.recorded_session import RecordedSession, SessionPolicy
from toolwise.rollout.scheduler import Episode, RolloutScheduler
from toolwise.types import EvaluateResult, Rollout, RouteDecision, StopReason, Task
from toolwise.untrusted.user_code import describe

log = logging.getLogger("toolwise.agents")
UNUSED_REWARD = 'the reward that the agent returns is not used: set reward.function = "agent"'


class SessionGateway(Protocol):
    """What makes a session's calls reachable: an HTTP server."""

    async def open(self, session: RecordedSession) -> str:
        """Accept the session's calls; returns the base URL for an OpenAI client."""

    def end(self, session: RecordedSession) -> None:
        """Refuse its calls from now on."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OutsideAgent:
    """An agent that is not ours, and how it reaches the model."""

    pool: AgentPool
    gateway: SessionGateway
    notices: set[str] = field(default_factory=set)
    """What was said once already."""

    def warn_once(self, text: str) -> None:
        if text not in self.notices:
            self.notices.add(text)
            log.warning("%s", text)

    def close(self) -> None:
        self.pool.close()
        self.gateway.close()


class AgentRequest:
    """One rollout. `run` raises only when it is cancelled from outside."""

    def __init__(
        self, agent: OutsideAgent, session: RecordedSession, deadline_s: float, *, uses_reward: bool = True
    ) -> None:
        """`uses_reward`: what the agent returns is its reward."""
        self.agent, self.session, self.deadline_s = agent, session, deadline_s
        self.uses_reward = uses_reward
        self.batch_data_id = session.batch_data_id
        self._rollout: Rollout | None = None

    async def run(self) -> None:
        late = TimeoutError(f"the agent took longer than {self.deadline_s:g} s")
        reward: EvaluateResult | None = None
        ending: dict[str, Any] = {"stop_reason": StopReason.POLICY_FAULT, "fault": "the run was interrupted"}
        self.session.begin()
        try:
            reward = _read_reward(await run_with_deadline(self.deadline_s, self._work(), late, WorkClock()))
            ending = self._normal_ending(reward)
            if reward is not None and not self.uses_reward:
                self.agent.warn_once(UNUSED_REWARD)
        except Exception as fault:
            ending = {"stop_reason": StopReason.DEADLINE, "fault": str(late)} if fault is late else self._ending(fault)
        finally:
            self.agent.gateway.end(self.session)
            self._rollout = self.session.close(reward, **ending)
            log.info("%s: %s after %d calls", self._rollout.rollout_id, ending["stop_reason"], len(self._rollout.steps))

    def to_rollout(self) -> Rollout:
        assert self._rollout is not None, "run() first"
        return self._rollout

    async def _work(self) -> Any:
        session = self.session
        base_url = await self.agent.gateway.open(session)
        return await self.agent.pool.run(task_fields(session.decision), base_url, session.api_key)

    def _normal_ending(self, reward: EvaluateResult | None) -> dict[str, Any]:
        session = self.session
        if reward is not None and reward.error is not None:
            return {"stop_reason": StopReason.ENV_FAULT, "fault": f"run returned no reward: {reward.error.message}"}
        if session.policy_fault is not None:  # the agent went on without the reply
            fault = {"fault": session.policy_fault, "infrastructure_fault": True}
            return {"stop_reason": StopReason.ANSWERED, **fault}
        if session.limit_reached is not None:
            return {"stop_reason": session.limit_reached.reason, "fault": str(session.limit_reached)}
        if not session.calls:
            text = "the agent made no call of the model: does it use the base_url that it was given?"
            return {"stop_reason": StopReason.ENV_FAULT, "fault": text}
        cut = session.calls[-1].tokens.finish_reason == "length"
        return {"stop_reason": StopReason.MAX_TOKENS if cut else StopReason.ANSWERED}

    def _ending(self, fault: Exception) -> dict[str, Any]:
        session, died = self.session, isinstance(fault, AgentDiedError)
        text = str(fault) if isinstance(fault, ToolwiseError) else describe(fault)
        if died:
            return {"stop_reason": StopReason.ENV_FAULT, "fault": text, "infrastructure_fault": True}
        if session.limit_reached is not None:
            return {"stop_reason": session.limit_reached.reason, "fault": str(session.limit_reached)}
        if session.policy_fault is not None:
            return {"stop_reason": StopReason.POLICY_FAULT, "fault": f"{session.policy_fault}; the agent: {text}"}
        is_run = isinstance(fault, AgentFaultError) and not self.agent.pool.config.command
        return {"stop_reason": StopReason.ENV_FAULT, "fault": f"agent.run failed: {text}" if is_run else text}


def task_fields(decision: RouteDecision) -> dict[str, Any]:
    """The task as an agent gets it: plain JSON, with the prompt as OpenAI messages."""
    task: Task = decision.task
    fields = task.model_dump(mode="json", exclude={"prompt_ids", "termination_regex"})
    return {**fields, "prompt": [message.to_openai() for message in decision.prompt]}


def _read_reward(value: Any) -> EvaluateResult | None:
    """What `run` returned as a reward; None for nothing or text, which the run's reward function scores."""
    return None if value is None or isinstance(value, str) else read_result(value)


@dataclass(frozen=True, slots=True)
class AgentScheduler(RolloutScheduler):
    """Runs an outside agent's rollouts instead of our own episodes."""

    agent: OutsideAgent | None = None
    session_policy: SessionPolicy | None = None
    max_calls: int = 64
    uses_reward: bool = True

    def episodes(self, decisions: Sequence[RouteDecision], *, do_sample: bool = True) -> Sequence[Episode]:
        assert self.agent is not None
        assert self.session_policy is not None
        return [
            AgentRequest(
                self.agent,
                RecordedSession(
                    decision,
                    self.session_policy,
                    batch_data_id=index,
                    rollout_offset=offset,
                    do_sample=do_sample,
                    max_calls=self.max_calls,
                    max_tokens=self.max_tokens,
                    model_gate=self.limits.model,
                ),
                self.deadline_s,
                uses_reward=self.uses_reward,
            )
            for index, decision in enumerate(decisions)
            for offset in range(decision.n)
        ]
