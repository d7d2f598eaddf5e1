"""LangGraph: a graph of a model and its tools, with `langchain-openai` as the client."""

import small_world
from langchain_core.messages import convert_to_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MAX_STEPS = 12
"""A model call and a tool call are a step each."""


async def run(task: dict, base_url: str, api_key: str) -> None:
    documents = small_world.documents_of(task)

    @tool
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression exactly."""
        return small_world.calculator(expression)

    @tool
    def search(query: str) -> str:
        """Searches the documents at hand and gives back the text that fits the query best."""
        return small_world.search(query, documents)

    tools = [calculator, search]
    model = ChatOpenAI(model="toolwise", base_url=base_url, api_key=api_key).bind_tools(tools)

    async def think(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", think)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    try:
        await graph.compile().ainvoke({"messages": convert_to_messages(task["prompt"])}, {"recursion_limit": MAX_STEPS})
    except GraphRecursionError:
        return  # the model's doing: the rollout is scored as it is
