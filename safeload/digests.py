"""SHA-256 digests: of a buffer, and of bytes as they stream past."""

from __future__ import annotations

import hashlib
import re

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 digest as every file of ours writes it: 64 lower-case hexadecimal digits."""

HASH_CHUNK_BYTES = 256 * 1024
"""How much is read and hashed at a time: small enough to be hashed while in the L2 cache, large enough that
the call itself costs nothing (256 KiB to 1 MiB measure alike)."""


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 digest of `data` as 64 lower-case hexadecimal digits (FIPS 180-4)."""
    return hashlib.sha256(data).hexdigest()
