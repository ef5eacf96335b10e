"""Messages that somebody might send who means harm, or who speaks another version: for any receiver of frames."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

NESTED = b"\x91" * 100_000 + b"\xc0"
"""A msgpack value in so many lists."""
NUMBERS = [b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf0" + b"\0" * 6, b"\xc0", b"\x80", b"\x90"]
"""As msgpack: the largest, the smallest, infinity, nothing, and two containers."""


def with_unknown_field(body: bytes) -> bytes:
    """The msgpack map `body` (of up to 14 fields) with one more field, nested so deeply that decoders give up."""
    return bytes([body[0] + 1]) + body[1:] + b"\xa1x" + NESTED


def messages(valid: Sequence[Sequence[bytes]], *, count: int, seed: int = 0) -> Iterator[list[bytes]]:
    """`count` messages made from `valid` ones, most of them broken in one way or several."""
    dice = random.Random(seed)
    for _ in range(count):
        frames = [bytearray(frame) for frame in dice.choice(valid)]
        for _ in range(dice.choice((1, 1, 2, 5))):
            match dice.randrange(7):
                case 0:  # other bytes
                    frame = dice.choice(frames)
                    for _ in range(dice.randrange(1, 9) if frame else 0):
                        frame[dice.randrange(len(frame))] = dice.randrange(256)
                case 1:  # another number, or no number
                    frame = dice.choice(frames)
                    at = dice.randrange(len(frame) + 1)
                    frame[at : at + 1] = dice.choice(NUMBERS)
                case 2:
                    frame = dice.choice(frames)
                    del frame[dice.randrange(len(frame) + 1) :]
                case 3:
                    frames.insert(dice.randrange(len(frames) + 1), bytearray(dice.randbytes(dice.randrange(40))))
                case 4 if len(frames) > 1:
                    frames.pop(dice.randrange(len(frames)))
                case 5:
                    dice.shuffle(frames)
                case _:
                    frame = dice.choice(frames)
                    frame[dice.randrange(len(frame) + 1) : 0] = NESTED[-dice.choice((10, 5000, 100_001)) :]
        yield [bytes(frame) for frame in frames]
