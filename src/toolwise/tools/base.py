"""The tool life cycle: create once per rollout, execute many times, calc_reward and release exactly once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import BaseModel, Field

ToolResult = tuple[str, float | None, dict[str, Any]]
"""Text for the model, step reward or None, info."""


class FunctionSchema(BaseModel):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""


class OpenAIFunctionToolSchema(BaseModel):
    """A tool as OpenAI's chat API describes it."""

    type: str = "function"
    function: FunctionSchema


class BaseTool(ABC):
    """A tool. Each rollout has its own instance, identified by the id that `create` returns.

    The router uses `family` (SEARCH, CALCULATE or OTHER), the budget uses `price`, the cost of one call.
    """

    family: str = "OTHER"
    price: float = 1.0
    max_concurrent: int | None = None
    """Maximum number of concurrent calls over all rollouts; None means unlimited."""
    isolate: bool | None = False
    """True: each rollout's tool object lives in a separate process, which can be killed at a deadline."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.family = config.get("family", self.family)
        self.price = float(config.get("price", self.price))
        self.isolate = config.get("isolate", self.isolate)
        self.max_concurrent = config.get("max_concurrent", self.max_concurrent)

    @property
    def name(self) -> str:
        return self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Create an instance for one rollout and return its id."""
        return instance_id or str(uuid4())

    @abstractmethod
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Run one call and return (text for the model, step reward or None, info). `parameters` are the model's
        arguments, `kwargs` the task's `execute_kwargs`; the two are never mixed."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The tool's reward for the whole rollout, called once at its end; None for no reward."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the resources of the instance. Called exactly once, however the rollout ended."""
        return


class BuiltinTool(BaseTool):
    """A tool with one argument, a string, and a default schema, which a configuration may replace."""

    default_schema: ClassVar[OpenAIFunctionToolSchema]

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or self.default_schema)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        (argument,) = self.default_schema.function.parameters["required"]
        if not isinstance(parameters.get(argument), str):
            return f"error: {argument} must be a string", None, {"ok": False}
        return await self.run(instance_id, parameters[argument])

    async def run(self, instance_id: str, text: str) -> ToolResult:
        """One call with the argument `text`."""
        raise NotImplementedError


def one_argument_schema(
    name: str, description: str, argument: str, argument_description: str
) -> OpenAIFunctionToolSchema:
    """The schema of a tool with one argument, a string."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": argument_description}},
        "required": [argument],
    }
    return OpenAIFunctionToolSchema(function=FunctionSchema(name=name, description=description, parameters=parameters))
