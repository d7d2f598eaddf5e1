"""The rendezvous of learners: a store on the first one's node, and the network interface that gloo uses on each node.

Both follow from the addresses that the cluster has for its nodes. A host name may resolve to 127.0.1.1 (Debian), which
no other node reaches.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

from toolwise.cluster.interface import ClusterError

SIOCGIFADDR = 0x8915
"""Asks the kernel for the IPv4 address of an interface."""


def listen(host: str) -> socket.socket:
    """A free port of this node's address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError as fault:
        raise ClusterError(
            f"{socket.gethostname()} cannot listen at {host}, its address in the cluster ({fault}): start its node "
            "with an address that it has, ray start --node-ip-address"
        ) from fault


def join_group(
    backend: str,
    store: tuple[str, int],
    host: str,
    rank: int,
    ranks: int,
    listener: socket.socket | None,
    *,
    limit_s: float,
) -> None:
    """Join the process group whose store is at `store`; the first rank, which has the `listener`, serves it."""
    if "gloo" in backend and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(host)
    limit = timedelta(seconds=limit_s)
    served = dist.TCPStore(  # type: ignore[attr-defined]
        *store,
        world_size=ranks,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    dist.init_process_group(backend, store=served, rank=rank, world_size=ranks, timeout=limit)


def interface_of(host: str) -> str:
    """The network interface of this machine that has the IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(reply[20:24]) == host:
                return name
    raise ClusterError(
        f"{host}, the address of {socket.gethostname()} in the cluster, is of none of its network interfaces: set "
        "GLOO_SOCKET_IFNAME there to the one that reaches the other nodes"
    )
