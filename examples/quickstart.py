import toolwise

towns = "Alder Brenna Corvin Dalmar Elowen Farrow Gorrin Hadley Istra Jorvik Kelda Lorne Maren Norvale Orsa Pellin"
bridges = {town: 100 + 7 * i for i, town in enumerate(towns.split())}


def search(query: str) -> str:
    """Looks up what is known about a town."""
    return next((f"{town} has {n} bridges." for town, n in bridges.items() if town in query), "No results.")


def right_and_thrifty(messages, ground_truth):
    right = messages[-1].content == f"Answer: {ground_truth}"
    return right - 0.1 * sum(len(m.tool_calls or []) for m in messages)


if __name__ == "__main__":  # workers load this file again for its functions
    tasks = [{"prompt": f"How many bridges does {town} have?", "ground_truth": n} for town, n in bridges.items()]
    settings = {"actor": {"lr": 2e-4}, "data": {"batch_size": 8}, "trainer": {"total_steps": 12}}
    result = toolwise.train(
        settings, model="builtin:small", tasks=tasks[:8], val=tasks[8:], tools=[search], reward=right_and_thrifty
    )
    print(result.summary["before"]["score"], "->", result.summary["after"]["score"], result.out / "report.html")
