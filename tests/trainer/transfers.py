"""Random needs of model workers, and arrays to meet them with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from streamrl.trainer.redistributor import ArrayFacts, Name
from streamrl.trainer.worker.data import Array

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")
KEYS = ("packed_input_ids", "packed_loss_mask", "rewards", "values")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (64,), (3, 5), (2, 0), (2, 3, 4))


class Needs(NamedTuple):
    """Who has what, and who is to have what."""

    pieces: list[ArrayFacts]
    holders: dict[Name, set[int]]
    wanted: dict[Name, set[int]]


@st.composite
def needs(draw: st.DrawFn, *, ranks: int = 5) -> Needs:
    everybody = st.integers(0, ranks - 1)
    names = draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(KEYS)), unique=True, max_size=25))
    pieces = [ArrayFacts(*name, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))) for name in names]
    holders = {name: draw(st.sets(everybody, min_size=1)) for name in names}
    wanted = {name: draw(st.sets(everybody)) for name in names}
    return Needs(pieces, holders, wanted)


def random_needs(seed: int, *, ranks: int, groups: int) -> Needs:
    """The same in every process."""
    rng = np.random.default_rng(seed)
    pieces = [
        ArrayFacts(seq, key, str(rng.choice(DTYPES)), SHAPES[rng.integers(len(SHAPES))])
        for seq in range(groups)
        for key in KEYS
    ]
    names = [(piece.seq, piece.key) for piece in pieces]

    def some(least: int) -> set[int]:
        return set(rng.choice(ranks, rng.integers(least, ranks + 1), replace=False).tolist())

    return Needs(pieces, {name: some(1) for name in names}, {name: some(0) for name in names})


def make_array(piece: ArrayFacts) -> Array:
    """Values that depend on the array's name alone."""
    rng = np.random.default_rng([piece.seq, *piece.key.encode()])
    return rng.integers(0, 100, piece.shape).astype(piece.dtype)
