"""Converts public datasets from their published form to rows for `load_tasks`. Run once before training."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from os.path import realpath
from pathlib import Path

from toolwise.data.files import READABLE, WRITABLE, Row, drop_nulls, read_rows, row_error, write_rows
from toolwise.data.rlla_rows import parse_tools
from toolwise.data.rows import read_task
from toolwise.errors import DataError

CALCULATOR_PROMPT = (
    "You solve word problems step by step. You may call the `calculator` tool whenever arithmetic is easier "
    "to compute than to do in your head. Put your final answer on the last line as `#### <answer>`, a number "
    "alone."
)
ORACLE_PROMPT = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
RLLA_ABILITY = "math"
"""The value in all of RLLA's own rows; converted rows use the same, so that both can be mixed."""

_SPLITS = ("train", "test")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

RowConverter = Callable[[Path, int, Row, str], Row]
"""Converts (source file, row number, row, split) to a row in our layout."""


def prepare_gsm8k(source: str | Path, out: str | Path, *, oracle_tool: bool = False) -> dict[Path, int]:
    """Converts GSM8K's {question, answer} rows and offers a calculator. Returns each file written and its rows.

    `oracle_tool` offers `calc_gsm8k_reward` instead, which tells the model whether its answer is correct.
    """
    return _prepare(Path(source), Path(out), partial(_gsm8k_row, oracle_tool=oracle_tool))


def prepare_rlla(source: str | Path, out: str | Path) -> dict[Path, int]:
    """Converts RLLA's {instruction, input, output} rows to RLLA's Parquet layout; also accepts converted rows."""
    return _prepare(Path(source), Path(out), _rlla_row)


def _prepare(source: Path, out: Path, convert: RowConverter) -> dict[Path, int]:
    written = {}
    for path, split, target in _plan(source, out):
        rows = [convert(path, number, row, split) for number, row in enumerate(read_rows(path))]
        write_rows(rows, target)
        written[target] = len(rows)
    return written


def _plan(source: Path, out: Path) -> list[tuple[Path, str, Path]]:
    """(input file, split, output file) for a single file, or for a folder with train and test files."""
    if source.is_dir():
        if out.suffix in WRITABLE:
            raise DataError(f"{out}: a file, but {source} is a folder of splits; give a folder to write to")
        plan = [(path, split, out / f"{split}.parquet") for split, path in _split_files(source)]
    else:
        split = source.stem if source.stem in _SPLITS else "train"
        plan = [(source, split, out if out.suffix and not out.is_dir() else out / f"{source.stem}.parquet")]
    for path, _, target in plan:
        if realpath(target) == realpath(path):
            raise DataError(f"{target}: the output would replace its own source; give another output path")
    return plan


def _split_files(folder: Path) -> list[tuple[str, Path]]:
    files = [(split, folder / f"{split}{suffix}") for split in _SPLITS for suffix in READABLE]
    files = [(split, path) for split, path in files if path.is_file()]
    if not files:
        raise DataError(f"{folder}: has no train or test file ({', '.join(READABLE)}); give the file itself")
    if len(files) > len({split for split, _ in files}):
        names = ", ".join(path.name for _, path in files)
        raise DataError(f"{folder}: has one split in two formats ({names}); give the file you mean")
    return files


def _gsm8k_row(path: Path, number: int, row: Row, split: str, oracle_tool: bool) -> Row:
    question, answer = (_required_text(path, number, row, field) for field in ("question", "answer"))
    solution = _final_answer(path, number, answer)
    extra: Row = {"split": split, "index": number, "answer": answer, "question": question}
    if oracle_tool:
        kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}}}
        extra |= {"need_tools_kwargs": True, "tools_kwargs": kwargs}
    else:
        # By name: the calculator takes no kwargs, and Parquet cannot store an empty object.
        extra |= {"need_tools_kwargs": False, "tools": ["calculator"]}
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": ORACLE_PROMPT if oracle_tool else CALCULATOR_PROMPT},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": extra | {"interaction_kwargs": {"query": question, "ground_truth": solution}},
    }


def _final_answer(path: Path, number: int, answer: str) -> str:
    """The text after the last `####`, without thousands separators."""
    _, mark, text = answer.rpartition("####")
    value = text.strip().replace(",", "").removeprefix("$")
    if not mark or not _NUMBER.fullmatch(value):
        raise row_error(
            path, number, "answer", f"{answer[-40:]!r} does not end in '#### <number>'; add the final answer"
        )
    return value


def _rlla_row(path: Path, number: int, row: Row, split: str) -> Row:
    if "prompt" in row:
        return _complete_rlla_row(path, number, row, split)
    instruction, question, output = (
        _required_text(path, number, row, field) for field in ("instruction", "input", "output")
    )
    _check_tools(path, number, "instruction", instruction)
    return _rlla_layout(instruction, question, output, number, split)


def _rlla_layout(instruction: str, question: str, output: str, number: int, split: str) -> Row:
    return {
        "data_source": "rlla",
        "prompt": [{"role": "system", "content": instruction}, {"role": "user", "content": question}],
        "ability": RLLA_ABILITY,
        "reward_model": {"ground_truth": output, "style": "rule"},
        "extra_info": {
            "index": number,
            "input": question,
            "instruction": instruction,
            "output": output,
            "split": split,
        },
    }


def _complete_rlla_row(path: Path, number: int, row: Row, split: str) -> Row:
    """Fills in missing fields of a converted row; additional columns stay."""
    task = read_task(path, number, row, {})
    roles = [message.role for message in task.prompt]
    if roles != ["system", "user"]:
        raise row_error(
            path, number, "prompt", f"has the roles {roles}; an RLLA row is one system and one user message"
        )
    if not isinstance(task.ground_truth, str):
        raise row_error(
            path, number, "reward_model.ground_truth", "missing or not a string; give the gold answer as text"
        )
    instruction, question = (message.content or "" for message in task.prompt)
    _check_tools(path, number, "prompt[0].content", instruction)
    layout = _rlla_layout(instruction, question, task.ground_truth, number, split)
    given = row.get("extra_info")
    layout["extra_info"] |= drop_nulls(given) if isinstance(given, dict) else task.extra_info
    layout |= {"data_source": task.data_source or "rlla", "ability": task.ability or RLLA_ABILITY}
    return layout | {name: value for name, value in row.items() if name not in layout}


def _check_tools(path: Path, number: int, field: str, instruction: str) -> None:
    try:
        parse_tools(instruction)
    except DataError as error:
        raise row_error(path, number, field, str(error)) from error


def _required_text(path: Path, number: int, row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        problem = f"missing or empty (the row has {', '.join(row) or 'nothing'}); check that this is the right dataset"
        raise row_error(path, number, field, problem)
    return value
