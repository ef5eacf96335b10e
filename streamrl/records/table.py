"""Rows of named numbers, stored by column, so that the data of a long run are small and quick to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.float64]
"""One number for each row; NaN if the row has none."""


class Table:
    """Rows of named numbers that are appended to; a row need not have every name."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order in which they were added."""
        return list(self._columns)

    def extend(self, rows: Sequence[Mapping[str, float]], **more: Sequence[float]) -> None:
        """Append `rows`; `more`: further columns, with one value for each row."""
        if not rows:
            return
        end = self._rows + len(rows)
        names = list({name: None for row in rows for name in row})
        columns = dict(zip(names, _columns(rows, names), strict=True)) | more
        for name, values in columns.items():
            column = self._columns.get(name)
            if column is None or len(column) < end:
                grown = np.full(max(64, 2 * end), np.nan)
                if column is not None:
                    grown[: len(column)] = column
                self._columns[name] = column = grown
            column[self._rows : end] = values
        self._rows = end

    def column(self, name: str) -> Column:
        """Return the values of `name`, one for each row."""
        found = self._columns.get(name)
        if found is None:
            return np.full(self._rows, np.nan)
        if len(found) < self._rows:  # no row has had this name since the column was last enlarged
            found = np.concatenate([found, np.full(2 * self._rows - len(found), np.nan)])
            self._columns[name] = found
        return found[: self._rows]


def _columns(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> Iterable[Sequence[float]]:
    """Return the values of each of `names`, one for each of `rows`."""
    if len(names) > 1 and all(len(row) == len(names) for row in rows):  # the usual case: all rows have all names
        return zip(*map(itemgetter(*names), rows), strict=True)
    return ([row.get(name, np.nan) for row in rows] for name in names)


def growth(counts: Column) -> Column:
    """Return the total growth of a counter at each row; a counter that begins at 0 again continues from where it was.

    NaN counts as unchanged. The first value counts as grown from 0.
    """
    if not len(counts):
        return counts
    last = np.maximum.accumulate(np.where(np.isfinite(counts), np.arange(len(counts)), -1))
    held = np.where(last >= 0, counts[np.maximum(last, 0)], 0.0)
    steps = np.diff(held, prepend=0.0)
    return np.cumsum(np.where(steps >= 0, steps, held))


def thinned(x: Column, columns: Mapping[str, Column], *, points: int) -> tuple[Column, dict[str, Column]]:
    """Return at most `points` rows that look like all of them when drawn: the least and greatest value of each stretch.

    Rows are pairs: the two of a stretch are placed at its beginning and its middle, in their original order. If there
    are at most `points` rows, all are returned.
    """
    rows = len(x)
    if rows <= points:
        return x, dict(columns)
    stretches = max(1, points // 2)
    edges = np.linspace(0, rows, stretches + 1).astype(np.intp)
    begins, middles = edges[:-1], (edges[:-1] + edges[1:]) // 2
    at = np.empty(2 * stretches)
    at[0::2], at[1::2] = x[begins], x[middles]
    found: dict[str, Any] = {}
    for name, column in columns.items():
        known = ~np.isnan(column)
        low = np.minimum.reduceat(np.where(known, column, np.inf), begins)
        high = np.maximum.reduceat(np.where(known, column, -np.inf), begins)
        rising = column[begins] <= column[edges[1:] - 1]
        pair = np.empty(2 * stretches)
        pair[0::2], pair[1::2] = np.where(rising, low, high), np.where(rising, high, low)
        pair[~np.isfinite(pair)] = np.nan
        found[name] = pair
    return at, found
