"""The network interface by which ranks on several machines meet."""

from __future__ import annotations

import logging
import os
import socket

import psutil

logger = logging.getLogger(__name__)

DISCARD_PORT = 9
"""Port of the service that drops what it gets; nothing is sent there."""


def use_interface_towards(host: str) -> None:
    """Let gloo and NCCL of this process use the network interface that leads to `host`; a variable that is set stays.

    gloo would take the interface of the machine's own name, which is the one for 127.0.1.1 on many machines.
    """
    [kind, *_, address] = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: the kernel only chooses the way
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    names = [name for name, addresses in interfaces if own in [each.address for each in addresses]]
    if not names:
        logger.warning("no network interface has the address %s; cluster.env.GLOO_SOCKET_IFNAME can name one", own)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={names[0]}")  # with = it is the whole name, not its beginning
