"""SHA-256 digests: of a buffer, and of bytes as they stream past. BLAKE3 beside them, where somebody signed it."""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import Literal, Protocol, TypeAlias, cast

from safeload.errors import ConfigError

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 digest as every file of ours writes it: 64 lower-case hexadecimal digits."""

HASH_CHUNK_BYTES = 256 * 1024
"""How much is read and hashed at a time: small enough to be hashed while in the L2 cache, large enough that
the call itself costs nothing (256 KiB to 1 MiB measure alike)."""

CHUNK_BYTES = 16 * 1024 * 1024
"""How much of a file one chunk digest of a manifest covers. 300 GB have 19,200 of them, 1.1 MB of the manifest; a
finer division would cost more to read than it saves when a file is repaired or read in parallel."""


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 digest of `data` as 64 lower-case hexadecimal digits (FIPS 180-4)."""
    return hashlib.sha256(data).hexdigest()


Algorithm: TypeAlias = Literal["sha256", "blake3"]
"""A digest that a manifest can hold of a file; both are 32 bytes long."""


INSTALL_BLAKE3 = "install safeload with its extra `blake3`: pip install '.[blake3]' in its repository"


class Crc32:
    """The CRC-32 of zip archives (APPNOTE 4.4.7), which proves nothing against anybody and tells of accidents."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        """Return the checksum of all bytes so far, 4 bytes, the most significant first."""
        return self._value.to_bytes(4, "big")

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far in hexadecimal."""
        return self.digest().hex()


class Hasher(Protocol):
    """Takes bytes as they come, and says their digest."""

    def update(self, data: memoryview, /) -> object:
        """Take more bytes."""

    def digest(self) -> bytes:
        """Return the digest of all bytes so far."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far in hexadecimal."""


def new_hasher(algorithm: Algorithm) -> Hasher:
    """Return a fresh hasher.

    Raises:
        ConfigError: It is BLAKE3, whose package is not installed.
    """
    return hashlib.sha256() if algorithm == "sha256" else new_blake3()


def has_blake3() -> bool:
    """Whether the package that computes BLAKE3 is installed."""
    try:
        new_blake3()
    except ConfigError:
        return False
    return True


def new_blake3() -> Hasher:
    """Return a fresh BLAKE3 hasher of 32 bytes.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        from blake3 import blake3
    except ImportError as err:
        raise ConfigError("the package blake3 is not installed", hint=INSTALL_BLAKE3) from err
    return cast("Hasher", blake3())
