"""`toolwise chat`: a conversation with an agent in the terminal."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.rollout import describe_route, load_agent
from toolwise.cli.train import OverridesOption, TrustOption
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.terminal import print_error, print_line, print_text

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent
    from toolwise.agent.events import AgentAnswer, AgentEvent
    from toolwise.messages import Message

HELP = """/budget [COST]  show or set the mean cost per question that the router keeps to; auto: the trained one
/cap [COST]     show what the conversation has cost and may still cost; set what it may still cost, or none
/route [NAME]   show or set the route of the next questions; auto: the router's
/tools          list the tools
/save FILE      write the conversation to a new JSON file
/help           this text
/quit           leave; so does Ctrl-D. Ctrl-C ends an answer"""


def chat(
    source: Annotated[
        Path,
        typer.Argument(metavar="AGENT", help="Agent folder, run folder, checkpoint, or model.", show_default=False),
    ],
    budget: Annotated[
        float | None, typer.Option(min=0, help="Average cost allowed per question; the router keeps to it.")
    ] = None,
    cap: Annotated[
        float | None,
        typer.Option(
            "--max-cost",
            min=0,
            help="Maximum cost of the conversation; tool calls beyond it are refused. Not if tokens or seconds cost.",
        ),
    ] = None,
    route: Annotated[str, typer.Option(help="Force a route; auto: the router's.")] = "auto",
    tools: Annotated[
        list[str] | None,
        typer.Option(help="Tool to use instead of the agent's tools; repeatable. none: answer without tools."),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(help="Documents for the search tool: text, one document per line, or .jsonl with `text`."),
    ] = None,
    do_sample: Annotated[bool, typer.Option("--sample", help="Sample tokens instead of decoding greedily.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    overrides: OverridesOption = None,
    trust_code: TrustOption = False,
) -> None:
    """Talk with a trained agent: its words, tool calls and costs as they come. /help lists the commands."""
    agent = load_agent(source, tools, documents, overrides, trust_code)
    if budget is not None:
        agent.check_budget(budget)
    Conversation(agent, left=cap, route=route, options={"budget": budget, "do_sample": do_sample, "seed": seed}).run()


@dataclass(slots=True)
class Conversation:
    agent: Agent
    left: float | None = None
    """What the conversation may still cost; None: no limit."""
    route: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    spent: float = 0.0
    _in_line: bool = False
    """Whether the model is writing a line."""

    def run(self) -> None:
        """Read and answer until the user leaves."""
        with suppress(ImportError):
            import readline  # noqa: F401  # line editing
        self._set_route(self.route)
        print_line("ask a question; /help lists the commands")
        while True:
            try:
                line = input("> ").strip()  # readline must know the prompt to redraw a line that is edited
            except EOFError:
                return print_line()
            except KeyboardInterrupt:
                print_line("\n/quit leaves")
                continue
            if line in ("/quit", "/exit"):
                return None
            try:
                self._command(line) if line.startswith("/") else self._ask(line)
            except KeyboardInterrupt:
                self._end_line()
                print_line("stopped; the question is left out of the conversation")
            except (ToolwiseError, OSError) as fault:
                self._end_line()
                print_error(fault)

    def _ask(self, question: str) -> None:
        from toolwise.agent.events import AgentAnswer
        from toolwise.messages import Message

        if not question:
            return
        asked = [*self.messages, Message(role="user", content=question)]
        with closing(self.agent.stream(asked, route=self.route, cap=self.left, **self.options)) as events:  # type: ignore[type-var]
            for event in events:
                self._show(event)
                if isinstance(event, AgentAnswer):
                    self.messages = [*asked, *event.messages]
                    self._account(event)

    def _show(self, event: AgentEvent) -> None:
        from toolwise.agent.events import RouteChosen, TextDelta, ToolCalled, ToolReturned

        if isinstance(event, TextDelta):
            print_text(event.text)
            self._in_line = True
            return
        self._end_line()
        if isinstance(event, RouteChosen):
            print_line(describe_route(event.route, event.route_probs))
        elif isinstance(event, ToolCalled):
            print_line(f"  {event.name}({json.dumps(event.arguments, ensure_ascii=False)})")
        elif isinstance(event, ToolReturned):
            print_line(f"    {event.text}")

    def _account(self, answer: AgentAnswer) -> None:
        self.spent += answer.cost
        if self.left is not None:
            self.left = max(0.0, self.left - answer.cost)
        refused = f", {answer.refused} calls refused" if answer.refused else ""
        print_line(f"[cost {answer.cost:g}{refused}, {answer.seconds:.2f} s; {self._describe_costs()}]")
        if answer.rollout.fault:
            print_line(f"the rollout ended with an error: {answer.rollout.fault}")

    def _describe_costs(self) -> str:
        return f"{self.spent:g} so far, {'no limit' if self.left is None else f'{self.left:g} left'}"

    def _end_line(self) -> None:
        if self._in_line:
            print_line()
        self._in_line = False

    def _command(self, line: str) -> None:
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/help":
            print_line(HELP)
        elif name == "/budget":
            self._set_budget(value)
        elif name == "/cap":
            self._set_cap(value)
        elif name == "/route":
            self._set_route(value or self.route)
            names = ", ".join(map(str, self.agent.routing.routes.names)) if self.agent.has_router else "none: no router"
            print_line(f"route: {self.route}; there are auto, {names}" if self.agent.has_router else f"routes: {names}")
        elif name == "/tools":
            prices = self.agent.call_prices
            for tool in self.agent.tools.values():
                print_line(f"{tool.name} (costs {prices[tool.name]:g}): {tool.tool_schema.function.description}")
            if not self.agent.tools:
                print_line("the agent has no tools")
        elif name == "/save":
            self._save(value)
        else:
            raise ConfigError(f"there is no command {name}; /help lists them")

    def _set_budget(self, value: str) -> None:
        _ = self.agent.routing  # raises if there is none
        if value:
            asked = _read_cost(value, unset="auto")
            if asked is not None:
                self.agent.check_budget(asked)
            self.options["budget"] = asked
        budget = self.options.get("budget")
        print_line(f"budget: {'auto' if budget is None else f'{budget:g} per question'}")

    def _set_cap(self, value: str) -> None:
        if value:
            self.left = _read_cost(value, unset="none")
        print_line(self._describe_costs())

    def _set_route(self, route: str) -> None:
        self.route = route if route == "auto" else str(self.agent.routing.routes.parse(route))

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs the name of a file")
        from toolwise.serialization.json_text import json_text

        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json_text([message.to_openai() for message in self.messages], indent=2) + "\n")
        except FileExistsError:
            raise ConfigError(f"{path} already exists: choose another file, nothing is ever overwritten") from None
        except OSError as fault:
            raise ConfigError(f"{path} cannot be written ({fault.strerror}): choose another file") from None
        print_line(f"wrote {path}")


def _read_cost(value: str, *, unset: str) -> float | None:
    try:
        cost = None if value == unset else float(value)
    except ValueError:
        cost = -1.0
    if cost is not None and not 0 <= cost < float("inf"):
        raise ConfigError(f"{value!r} is not a cost: write a number of at least 0, or {unset}")
    return cost
