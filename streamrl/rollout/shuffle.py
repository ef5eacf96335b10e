"""The order of the data: a permutation of each epoch that any process can compute for one index alone.

A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). It needs no table and does not depend on the
version of any library, so a resumed run sees the same order.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 6


def permuted_index(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Row at `position` (0 ≤ position < size) of the shuffled epoch."""
    if not 0 <= position < size:
        raise ValueError(f"position {position} is outside an epoch of {size} rows")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    index = position
    while True:  # 4 walks at most on average, because the network's domain is below 4 · size
        index = _feistel(index, half_bits=half_bits, key=f"{seed}/{epoch}")
        if index < size:
            return index


def _feistel(value: int, *, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
