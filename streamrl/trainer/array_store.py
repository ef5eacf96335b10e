"""The arrays that a model worker holds, by sequence number and key.

What arrives from the stream, from other workers and from model function calls ends up here until
the group is discarded. Safe to use from several threads; the arrays themselves are not copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from streamrl.errors import TransferError

Array = NDArray[Any]


class ArrayStore:
    """Arrays of any dtype and shape, named by (sequence number, key)."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, Array]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Groups of which anything is held."""
        return len(self._groups)

    def put(self, seq: int, key: str, array: Array) -> None:
        """Hold `array`; it takes the place of one with the same name."""
        with self._lock:
            self._groups.setdefault(seq, {})[key] = array

    def get(self, seq: int, key: str) -> Array:
        """The array itself; raises `TransferError` when it is not here."""
        with self._lock:
            held = self._groups.get(seq, {})
            if key in held:
                return held[key]
            raise TransferError(
                f"seq {seq} {key} is not held here; of this group are: {', '.join(sorted(held)) or 'nothing'}"
            )

    def has(self, seq: int, key: str) -> bool:
        with self._lock:
            return key in self._groups.get(seq, ())

    def discard(self, seqs: Iterable[int]) -> None:
        """Let go of all that is held of these groups, if anything is."""
        with self._lock:
            for seq in seqs:
                self._groups.pop(seq, None)
