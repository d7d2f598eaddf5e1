"""The first thing that runs in an agent's process: replaces itself by the agent's command, below its supervisor."""

from __future__ import annotations

import os
from typing import Any, NoReturn


def main(start: dict[str, Any]) -> NoReturn:
    """`start`: the channel, and the command, which gets the channel as its argument or as its standard streams."""
    command, channel = list(start["command"]), start["channel"]
    if start["worker"]:
        os.set_inheritable(channel, True)
        command.append(str(channel))
    else:
        os.dup2(channel, 0)
        os.dup2(channel, 1)
    try:
        os.execvp(command[0], command)
    except OSError as fault:
        os.write(2, f"cannot start {command[0]}: {fault.strerror}\n".encode())
        os._exit(127)
