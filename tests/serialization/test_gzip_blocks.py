"""Text in gzip blocks: any gzip reads it, and a reader can start anywhere."""

from __future__ import annotations

import gzip
import random
import struct
import subprocess
import tracemalloc
import zlib
from pathlib import Path

import pytest

from toolwise.serialization import gzip_blocks
from toolwise.serialization.gzip_blocks import DAMAGES, compress, open_text, read_text

LINES = [b'{"id": %d, "text": "%s"}\n' % (n, b"word " * (n % 97)) for n in range(3000)]
TEXT = b"".join(LINES)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gzip_blocks, "BLOCK_BYTES", 20_000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(compress(LINES))
    return path


def test_every_gzip_reads_it(file: Path) -> None:
    assert gzip.decompress(file.read_bytes()) == TEXT
    assert subprocess.run(["gzip", "-dc", file], capture_output=True, check=True).stdout == TEXT
    assert subprocess.run(["gzip", "-t", file], check=False).returncode == 0


def test_a_reader_can_start_anywhere(file: Path) -> None:
    rng = random.Random(0)
    with open_text(file) as text:
        for _ in range(200):
            start, count = rng.randrange(len(TEXT) + 10), rng.randrange(60_000)
            assert text.seek(start) == start
            assert text.read(count) == TEXT[start : start + count]
            assert text.tell() == max(start, min(start + count, len(TEXT)))


def test_lines_come_one_by_one_and_all_at_once(file: Path) -> None:
    with open_text(file) as text:
        assert list(text) == LINES
    assert read_text(file) == TEXT


def test_only_the_block_that_is_asked_for_is_decompressed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = gzip_blocks.zlib.decompressobj
    monkeypatch.setattr(gzip_blocks.zlib, "decompressobj", lambda **options: sizes.append(1) or real(**options))
    with open_text(file) as text:
        text.seek(len(TEXT) // 2)
        text.read(10)
    assert len(sizes) == 1
    assert sizes[0] < file.stat().st_size / 10


def test_plain_files_and_those_of_other_programs_are_read_too(tmp_path: Path) -> None:
    plain, foreign, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl.gz"
    plain.write_bytes(TEXT)
    foreign.write_bytes(gzip.compress(TEXT))
    empty.write_bytes(compress([]))
    assert read_text(plain) == read_text(foreign) == TEXT
    assert read_text(empty) == b""
    with open_text(foreign) as text:
        text.seek(1234)
        assert text.read(20) == TEXT[1234:1254]


@pytest.mark.parametrize("cut", [1, 10, 30, 5000])
def test_a_file_cut_off_is_an_error(cut: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(DAMAGES):
        read_text(file)


def test_a_changed_byte_is_an_error(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x55
    file.write_bytes(bytes(data))
    with pytest.raises(DAMAGES):
        read_text(file)


def test_a_line_longer_than_a_block_is_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip_blocks, "BLOCK_BYTES", 100)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(compress([b"a" * 10_000 + b"\n", b"b\n"]))
    with open_text(path) as text:
        text.seek(10_001)
        assert text.read() == b"b\n"


def test_a_block_with_more_text_than_its_header_names_is_not_decompressed(file: Path) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    text = bytes(200_000_000)
    body = packer.compress(text) + packer.flush() + struct.pack("<II", 0, 100)
    header = gzip_blocks._HEADER
    file.write_bytes(header.pack(gzip_blocks._START, 0, 0, 255, 12, b"Tw", 8, header.size + len(body), 100) + body)
    tracemalloc.start()
    with pytest.raises(zlib.error, match="does not have the 100 bytes"):
        read_text(file)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    file.write_bytes(header.pack(gzip_blocks._START, 0, 0, 255, 12, b"Tw", 8, header.size + len(body), 1 << 31) + body)
    with pytest.raises(zlib.error, match="more than"):
        read_text(file)
