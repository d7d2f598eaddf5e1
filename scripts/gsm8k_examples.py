"""Put two worked examples with calculator calls before each question of a prepared GSM8K file.

    toolwise data prepare gsm8k SOURCE --out gsm8k
    python scripts/gsm8k_examples.py gsm8k/train.parquet gsm8k/train_examples.parquet

A small model that was never trained on tool calls does not write one from a description alone; after two examples it
does, and reinforcement learning has something to work with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from toolwise.data.files import read_rows, write_rows

EXAMPLES = [
    ("A shop sells 14 boxes with 26 pens in each. How many pens is that?", "14 * 26", "364", "There are 364 pens."),
    ("Ann has 250 coins and gives away 87. How many are left?", "250 - 87", "163", "Ann has 163 coins left."),
]


def worked_examples() -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, (question, expression, result, answer) in enumerate(EXAMPLES):
        arguments = json.dumps({"expression": expression})
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": call["id"], "name": "calculator"},
            {"role": "assistant", "content": f"{answer}\n#### {result}"},
        ]
    return messages


def main() -> None:
    source, out = map(Path, sys.argv[1:3])
    rows = []
    for row in read_rows(source):
        *before, question = row["prompt"]
        rows.append({**row, "prompt": [*before, *worked_examples(), question]})
    write_rows(rows, out)
    print(f"wrote {len(rows):,} rows to {out}")


if __name__ == "__main__":
    main()
