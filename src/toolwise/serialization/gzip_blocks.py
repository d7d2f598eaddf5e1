"""Text files compressed with gzip in blocks, so that a reader can start anywhere. Any gzip reads them: a block is a
member of the file, and says in its header how long it is.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

SUFFIX = ".gz"
BLOCK_BYTES = 1 << 19
"""Of text; a block ends with the line that fills it."""
MAX_BLOCK_BYTES = 1 << 28
"""Of text that is read: a longer line was not written by a run."""
LEVEL = 6
_HEADER = struct.Struct("<4sIBBH2sHII")
"""Magic, method and flags; time; 2 bytes of the writer; then the extra field: its length, its name, the length of its
data, and the data: the bytes of the member and of its text."""
_START, _NAME = b"\x1f\x8b\x08\x04", b"Tw"


DAMAGES = (gzip.BadGzipFile, EOFError, zlib.error)
"""What reading a damaged file raises."""


class Block(NamedTuple):
    position: int
    """Of the member in the file."""
    size: int
    start: int
    """Of its text in that of the file."""
    length: int


def compress(lines: Iterable[bytes]) -> bytes:
    """The text of the lines in blocks of whole lines."""
    return b"".join(_member(text) for text in _joined(lines))


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _member(text: bytes) -> bytes:
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = packer.compress(text) + packer.flush() + struct.pack("<II", zlib.crc32(text), len(text) & 0xFFFFFFFF)
    return _HEADER.pack(_START, 0, 0, 255, 12, _NAME, 8, _HEADER.size + len(body), len(text)) + body


def open_text(path: Path) -> io.BufferedIOBase:
    """The text of a file, plain or in blocks, for reading from any position. Another gzip file can be read, too, but
    from the beginning only without waiting."""
    if path.suffix != SUFFIX:
        return path.open("rb")
    file = path.open("rb")
    blocks = _find_blocks(file)
    if blocks is None:
        file.close()
        return gzip.open(path)
    return io.BufferedReader(_BlockReader(file, blocks))


def read_text(path: Path) -> bytes:
    """All of it."""
    with open_text(path) as file:
        return file.read()


def _find_blocks(file: IO[bytes]) -> list[Block] | None:
    """The blocks of a file; None if it was not written here."""
    blocks: list[Block] = []
    end, position, start = file.seek(0, io.SEEK_END), 0, 0
    while position < end:
        file.seek(position)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        magic, *_, name, _, size, length = _HEADER.unpack(header)
        if (magic, name) != (_START, _NAME) or not _HEADER.size < size <= end - position:
            return None
        if length > MAX_BLOCK_BYTES:
            raise zlib.error(f"a block has {length} bytes, more than {MAX_BLOCK_BYTES}")
        blocks.append(Block(position, size, start, length))
        position, start = position + size, start + length
    return blocks


class _BlockReader(io.RawIOBase):
    """Reads the text of the blocks; keeps the latest one."""

    def __init__(self, file: IO[bytes], blocks: list[Block]) -> None:
        self._file, self._blocks = file, blocks
        self._starts = [block.start for block in blocks]
        self._end = blocks[-1].start + blocks[-1].length if blocks else 0
        self._position = 0
        self._held: tuple[int, bytes] = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._end:
            return 0
        number = bisect_right(self._starts, self._position) - 1
        text, offset = self._text(number), self._position - self._starts[number]
        part = text[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _text(self, number: int) -> bytes:
        if self._held[0] != number:
            block = self._blocks[number]
            self._file.seek(block.position)
            unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            text = unpacker.decompress(self._file.read(block.size), block.length + 1)
            if len(text) != block.length or not unpacker.eof:
                raise zlib.error(f"a block does not have the {block.length} bytes that its header names")
            self._held = number, text
        return self._held[1]

    def close(self) -> None:
        self._file.close()
        super().close()
