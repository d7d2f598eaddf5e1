"""Two network namespaces on this machine as two hosts: each has its own loopback interface and `/tmp/ray`, and a host
name that resolves to 127.0.1.1, as Debian has it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

ADDRESSES = {"toolwise-a": "10.213.7.1", "toolwise-b": "10.213.7.2"}
ENTER = 'mkdir -p /tmp/ray && mount --bind "$0" /tmp/ray && exec "$@"'
END_S = 60.0


def problem() -> str:
    """Why this machine cannot play two hosts; empty if it can."""
    if not (os.path.exists("/proc/self/ns/net") and shutil.which("ip") and shutil.which("unshare")):
        return "needs network namespaces, ip and unshare"
    if os.geteuid():
        return "needs root"
    tried = subprocess.run(["ip", "netns", "add", "toolwise-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "toolwise-try"], capture_output=True, check=False)
    return tried.stderr.decode().strip()


class TwoHosts:
    """`run` and `start` programs on a host; what still runs ends with the block."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> TwoHosts:
        ip("link", "add", "toolwise-a0", "type", "veth", "peer", "name", "toolwise-b0")
        for name, address in ADDRESSES.items():
            ip("netns", "add", name)
            ip("link", "set", f"{name}0", "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}0")
            ip("-n", name, "link", "set", f"{name}0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            hosts = Path("/etc/netns") / name / "hosts"  # which `ip netns exec` puts in place of /etc/hosts
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
            (self.folder / name).mkdir()
        return self

    def command(self, host: str, *command: object) -> list[str]:
        enter = ["ip", "netns", "exec", host, "unshare", "-m", "sh", "-c", ENTER, str(self.folder / host)]
        return [*enter, *map(str, command)]

    def start(self, host: str, *command: object) -> None:
        self.started.append(
            subprocess.Popen(
                self.command(host, *command),
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def run(self, host: str, *command: object, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(host, *command),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def __exit__(self, *_: Any) -> None:
        for process in reversed(self.started):
            process.terminate()
            until = time.monotonic() + END_S
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
        for name in ADDRESSES:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns") / name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
