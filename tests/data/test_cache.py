"""The cache of converted files: used, made again, shared between processes, and its errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolwise.data.cache import open_table
from toolwise.errors import DataError

SCRIPT = """
import sys
from pathlib import Path
from toolwise.data.cache import open_table
said = []
table = open_table(Path(sys.argv[1]), "train", Path(sys.argv[2]), said.append)
print(len(table), sum(text.startswith("converting") and "once" in text for text in said))
"""
LIMITED = """
import resource, sys
from pathlib import Path
from toolwise.data.cache import open_table
from toolwise.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    open_table(Path(sys.argv[1]), "train", Path(sys.argv[2]), lambda text: None)
except DataError as error:
    print(error)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(50)))
    return path


def conversions(file: Path) -> list[str]:
    said: list[str] = []
    open_table(file, "train", file.parent / "cache", said.append)
    return [text for text in said if text.startswith("converting")]


def entries(file: Path) -> list[Path]:
    return [path for path in (file.parent / "cache").iterdir() if not path.name.startswith(".")]


def test_a_file_is_converted_once(file: Path) -> None:
    assert len(conversions(file)) == 1
    assert conversions(file) == []


def test_a_changed_file_is_converted_again_and_replaces_the_old_copy(file: Path) -> None:
    conversions(file)
    with file.open("a") as opened:
        opened.write('{"prompt": "one more"}\n')
    assert len(conversions(file)) == 1
    assert len(entries(file)) == 1


def test_a_change_that_keeps_size_and_time_is_noticed(file: Path) -> None:
    conversions(file)
    before = file.stat()
    file.write_text(file.read_text().replace("prompt 7", "prompt 8"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(conversions(file)) == 1


def test_a_reader_keeps_the_copy_that_it_opened(file: Path) -> None:
    table = open_table(file, "train", file.parent / "cache", lambda text: None)
    file.write_text('{"prompt": "other"}\n')
    conversions(file)
    assert len(table) == 50
    assert table[49].prompt[0].content == "prompt 49"


@pytest.mark.parametrize("name", ["rows.arrow", "ids.arrow", "hashes.npy", "profiles.npy", "source.json"])
def test_a_damaged_copy_is_made_again(file: Path, name: str) -> None:
    conversions(file)
    damaged = entries(file)[0] / name
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert len(conversions(file)) == 1
    assert conversions(file) == []


def test_what_a_killed_process_left_is_removed(file: Path) -> None:
    conversions(file)
    entry = entries(file)[0]
    shutil.copytree(entry, left := entry.with_name(f".{entry.name}.1.tmp"))
    shutil.rmtree(entry)
    conversions(file)
    assert not left.exists()


def test_two_processes_at_once_convert_once(file: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(file), str(file.parent / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    assert outputs == ["50 0", "50 1"]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(file: Path) -> None:
    file.write_text("".join(json.dumps({"prompt": f"{number} " * 200}) + "\n" for number in range(50)))
    command = [sys.executable, "-c", LIMITED, str(file), str(file.parent / "cache")]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"{file}: its converted copy cannot be written to {file.parent / 'cache'} (File too large" in output
    assert "set data.cache to another folder" in output
    assert [path.name for path in (file.parent / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_a_cache_folder_that_cannot_be_made_is_a_clear_error(file: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written to .*Not a directory.*set data.cache to another folder"):
        open_table(file, "train", file / "cache", lambda text: None)


def test_a_bad_row_stops_the_conversion_with_its_file_and_row(file: Path) -> None:
    with file.open("a") as opened:
        opened.write('{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"train.jsonl: row 50 \(0-based\), field prompt: a int"):
        open_table(file, "train", file.parent / "cache", lambda text: None)
    assert entries(file) == []


def test_a_row_that_is_no_json_is_named_with_its_line(file: Path) -> None:
    with file.open("a") as opened:
        opened.write("\n{oops\n")
    with pytest.raises(DataError, match=r"train.jsonl: row 50 \(0-based; line 52\): not JSON"):
        open_table(file, "train", file.parent / "cache", lambda text: None)


def test_two_rows_of_one_id_are_an_error(file: Path) -> None:
    file.write_text('{"prompt": "?", "task_id": "a"}\n{"prompt": "?", "task_id": "a"}\n')
    with pytest.raises(DataError, match=r"row 1 \(0-based\), field task_id: 'a' is already the id of row 0"):
        open_table(file, "train", file.parent / "cache", lambda text: None)


def test_a_row_damaged_on_disk_is_an_error_that_names_file_row_and_copy(file: Path) -> None:
    table = open_table(file, "train", file.parent / "cache", lambda text: None)
    rows = table.folder / "rows.arrow"
    content = rows.read_bytes().replace(b'{"prompt": "prompt 7"}', b'["prompt": "prompt 7"}')
    with rows.open("r+b") as opened:  # in place, as a failing disk would
        opened.write(content)
    with pytest.raises(DataError, match=r"train.jsonl: row 7 .*copy is damaged .*; delete .*train-"):
        table[7]
