"""Which addresses may be talked to: those of the public internet, and what the caller named.

A mirror chooses where it redirects to, and whoever holds a name chooses what it resolves to. Without this check either
could have us ask the cloud's metadata service, a printer or a database, which trust whoever can reach them.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from safeload.errors import FetchError, escape, reason

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED: Final = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
"""NAT64 (RFC 6052, RFC 8215): the last 32 bits are an IPv4 address that the network translates to."""


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, and nothing hides a private one inside it.

    Args:
        address: In text, IPv4 or IPv6; a zone (`%eth0`) may follow.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return all(part.is_global and not part.is_multicast for part in _parts(parsed))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its spelling alone: `localhost`, or an address of 127.0.0.0/8 or ::1."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(host: str, port: int, *, allow_private: frozenset[str] = frozenset()) -> list[str]:
    """Return the addresses of a host, after every one of them was found to be public.

    One private address among public ones is refused as well: whoever answers for the name would only have to wait for
    the attempt that takes it. The caller connects to what is returned, and never asks for the name again.

    Args:
        host: Name or address, as the URL has it.
        port: TCP port.
        allow_private: Hosts that may have private addresses, in lower case.

    Raises:
        FetchError: The name has no address, or one that is not public.
    """
    shown = escape(host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as err:  # a label that is too long is a UnicodeError
        # Some names are not there, and others cannot be looked up just now.
        lasting = not isinstance(err, socket.gaierror) or err.errno == socket.EAI_NONAME
        message = f"cannot find the address of {shown}: {reason(err)}"
        raise FetchError(message, lasting=lasting, hint="check the URL") from err
    addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    if host.lower() in allow_private:
        return addresses
    if private := [address for address in addresses if not is_public(address)]:
        raise FetchError(
            f"expected {shown} to be a public host, found the address {escape(private[0])}",
            lasting=True,
            hint=f"if the mirror is one of your own network, name it: --allow-private {shown}",
        )
    return addresses


def _parts(address: _Address) -> list[_Address]:
    """Return the address and the IPv4 addresses that it stands for: mapped, 6to4, Teredo and NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    inner: list[_Address] = [address]
    if address.ipv4_mapped is not None:
        # What the kernel connects to; the mapping prefix itself is never global.
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        inner.append(address.sixtofour)
    if address.teredo is not None:
        inner += address.teredo
    if any(address in network for network in _TRANSLATED):
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return inner
