"""The exposition: names, labels, histograms; no label without bound."""

from __future__ import annotations

from toolwise.serve.prometheus import MAX_LABELS, ServerMetrics


def test_counters_gauges_and_histograms() -> None:
    metrics = ServerMetrics()
    metrics.responses["/health", "200"] += 2
    metrics.count_usage({"prompt_tokens": 3, "completion_tokens": 4, "route": "SEARCH", "calls": {"f": 2}, "cost": 0.5})
    metrics.answer_s.observe(0.3)
    lines = metrics.text({"engine/steps": 7.0}).splitlines()
    for line in (
        'toolwise_responses_total{path="/health",status="200"} 2',
        'toolwise_tokens_total{kind="completion"} 4',
        'toolwise_tool_calls_total{tool="f"} 2',
        'toolwise_routes_total{route="SEARCH"} 1',
        "toolwise_cost_total 0.5",
        'toolwise_answer_seconds_bucket{le="0.25"} 0',
        'toolwise_answer_seconds_bucket{le="0.5"} 1',
        'toolwise_answer_seconds_bucket{le="+Inf"} 1',
        "toolwise_answer_seconds_count 1",
        "toolwise_engine_steps 7",
    ):
        assert line in lines


def test_each_turn_with_a_route_of_its_own_counts() -> None:
    metrics = ServerMetrics()
    metrics.count_usage({"route": "SEARCH > SEARCH > ANSWER"})
    assert metrics.routes == {"SEARCH": 2, "ANSWER": 1}


def test_labels_are_escaped_and_bounded() -> None:
    metrics = ServerMetrics()
    metrics.count_usage({"calls": {'a"b\n': 1}})
    assert 'tool="a\\"b\\n"' in metrics.text({})
    for number in range(2 * MAX_LABELS):
        metrics.count_usage({"calls": {f"tool-{number}": 1}})
    assert len(metrics.tool_calls) == MAX_LABELS + 1
    assert metrics.tool_calls["other"] == MAX_LABELS + 1
