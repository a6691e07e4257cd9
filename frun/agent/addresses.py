"""Finds out where this machine is on the network. Name look-ups happen here, at the start, and nowhere else.

A machine's own name is never published: it may mean nothing to peers, or loopback (R46, S17).
"""

import asyncio
import ipaddress
import socket

import psutil

from frun.errors import LaunchError

_LOOKUP_S = 5.0


def own_addresses() -> frozenset[str]:
    """Return the address literals of this machine's interfaces, without zones."""
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    )


def machine_name() -> str:
    """Return the machine's short name, for people and for the order of ranks."""
    return socket.gethostname().partition(".")[0] or "host"


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address; empty when none has."""
    wanted = address.partition("%")[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == wanted for entry in entries):
            return name
    return ""


async def look_up(name: str) -> tuple[str, ...]:
    """Return the address literals of a name; a literal is its own. Empty when unknown or too slow."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return (name,)
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(
            loop.getaddrinfo(name, None, type=socket.SOCK_STREAM), _LOOKUP_S
        )
    except (OSError, TimeoutError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


async def names_this_machine(name: str) -> str | None:
    """Return the own address that `name` stands for, or None if it is another machine's."""
    own = own_addresses()
    for address in await look_up(name):
        if address.partition("%")[0] in own or ipaddress.ip_address(address).is_loopback:
            return address
    return None


async def check_local_addr(text: str) -> str:
    """Return the address literal of --local-addr. Raises LaunchError if it is not this machine's."""
    found = await look_up(text)
    if not found:
        raise LaunchError(f"--local-addr {text} is not known here: give an address of this machine")
    address = await names_this_machine(text)
    if address is None:
        raise LaunchError(
            f"--local-addr {text} ({', '.join(found)}) is not an address of this machine, which has"
            f" {', '.join(sorted(own_addresses()))}"
        )
    return address
