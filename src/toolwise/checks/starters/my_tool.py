"""A tool is a typed function. Edit it, then check it before you train:

toolwise check tool my_tool.py:my_tool --call '{"item": "bread"}'

In a configuration: tools = ["my_tool.py:my_tool"]
"""

from toolwise import tool

PRICES = {"bread": 2.5, "milk": 1.2, "rice": 3.0}


@tool(family="SEARCH", price=0.1)  # what routers and budgets know about it; both may be left out
def my_tool(item: str, quantity: int = 1) -> str:
    """Looks up what an item costs.

    Args:
        item: The item, such as bread.
        quantity: How many of it to buy.
    """
    # The model sees the name, the types and the texts above. Answer its mistakes with words that help it.
    price = PRICES.get(item.strip().lower())
    if price is None:
        return f"There is no {item!r:.40}. There are: {', '.join(PRICES)}."
    return f"{quantity} of {item.strip().lower()} cost {quantity * price:.2f}."
