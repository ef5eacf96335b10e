"""Rows kept by column; growth of counters; what is thinned out for a plot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.records.table import Table, growth, thinned

rows = st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6), max_size=3), max_size=40)


@given(st.lists(rows, max_size=6))
def test_a_table_has_what_was_put_in(batches: list[list[dict[str, float]]]) -> None:
    table = Table()
    for batch in batches:
        table.extend(batch)
        table.column("a")
    everything = [row for batch in batches for row in batch]
    assert len(table) == len(everything)
    for name in "abc":
        expected = np.array([row.get(name, np.nan) for row in everything])
        np.testing.assert_array_equal(table.column(name), expected)


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=5), min_size=1, max_size=5), st.data())
def test_growth_survives_restarts(lives: list[list[int]], data: st.DataObject) -> None:
    counts, expected, total = [], [], 0
    for increments in lives:
        count = 0
        for place, increment in enumerate([0, *increments]):
            count += increment
            total += increment
            counts.append(float(count))
            expected.append(float(total))
            if place and data.draw(st.booleans()):
                counts.append(np.nan)
                expected.append(float(total))
    np.testing.assert_array_equal(growth(np.array(counts)), expected)


values = st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(np.nan)), min_size=1, max_size=300)


@given(values, st.integers(2, 50))
def test_what_is_thinned_out_keeps_least_and_greatest(column: list[float], points: int) -> None:
    y = np.array(column)
    x = np.arange(len(y), dtype=float)
    at, found = thinned(x, {"y": y}, points=points)
    assert len(at) <= max(points, 2)
    assert (np.diff(at) >= 0).all()
    if not np.isnan(y).all():
        assert np.nanmin(found["y"]) == np.nanmin(y)
        assert np.nanmax(found["y"]) == np.nanmax(y)
    if len(y) <= points:
        np.testing.assert_array_equal(found["y"], y)
