"""Cases whose use of a shared disk is measured from outside run one by one: each would be charged for the others."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_on_the_disk() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / f"toolwise-tests-disk-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel gives it back when the file is closed
        yield
