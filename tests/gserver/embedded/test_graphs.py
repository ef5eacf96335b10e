"""Decode steps whose computation is recorded, tried on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.gserver.embedded import graphs
from streamrl.gserver.embedded.graphs import GraphedModel, filled_length, filled_rows
from streamrl.gserver.embedded.model import Extension, KVCache, Model, read_architecture
from streamrl.gserver.embedded.request import Draw, sample
from streamrl.gserver.embedded.weights import Parameters
from tests.gserver.recorder import Recorder
from tests.gserver.tiny import make_model, prompt, save

CPU = torch.device("cpu")
SLOTS, LONGEST = 20, 300


def models(folder: Path, record: Recorder) -> tuple[Model, GraphedModel]:
    architecture = read_architecture(folder)
    made = []
    for spare in (0, 1):
        parameters = Parameters(architecture, dtype=torch.float32, device=CPU)
        parameters.load(folder)
        cache = KVCache(architecture, max_slots=SLOTS, max_length=LONGEST, dtype=torch.float32, device=CPU, spare=spare)
        made.append((parameters, cache))
    return Model(*made[0], max_length=LONGEST, native=False), GraphedModel(*made[1], max_length=LONGEST, record=record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("model"))


def extend(model: Model, lengths: Sequence[int]) -> None:
    model.cache.reserve(slots=len(lengths), length=max(lengths))
    model.extend([Extension(slot=i, cached=0, tokens=prompt(n, seed=i)) for i, n in enumerate(lengths)])


def test_recorded_steps_compute_the_same_and_touch_no_other_slot(folder: Path) -> None:
    record = Recorder()
    plain, graphed = models(folder, record)
    lengths = [5, 90, 17, 120, 3, 44, 60, 8, 9, 127, 31]
    for model in (plain, graphed):
        extend(model, lengths)
    for step, rows in enumerate((11, 11, 10, 9, 5, 3, 1)):  # the last requests end first, the cache grows past 128
        tokens, positions = prompt(rows, seed=step), [n + step for n in lengths[:rows]]
        for model in (plain, graphed):
            model.cache.reserve(slots=rows, length=max(positions) + 1)
        expected, found = plain.decode(tokens, positions), graphed.decode(tokens, positions)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(graphed.cache.layers, plain.cache.layers, strict=True):
            torch.testing.assert_close(mine[:SLOTS][: len(theirs)], theirs, rtol=1e-4, atol=1e-4)
    assert 3 < record.recorded < 8


def test_each_set_of_weights_has_its_own_steps(folder: Path) -> None:
    record = Recorder()
    plain, graphed = models(folder, record)
    others = [Parameters(read_architecture(folder), dtype=torch.float32, device=CPU) for _ in range(2)]
    for other in others:
        other.load(folder)
        other.place("model.embed_tokens.weight").mul_(1.5)
    sets = [graphed.parameters, others[0]]
    for model in (plain, graphed):
        extend(model, [4, 6])
    for step in range(4):
        graphed.parameters = sets[step % 2]
        plain.parameters = plain.parameters if step % 2 == 0 else others[1]
        expected = plain.decode([1, 2], [4 + step, 6 + step])
        found = graphed.decode([1, 2], [4 + step, 6 + step])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        plain.parameters = sets[0]
    assert record.recorded == 2


def test_launched_steps_draw_as_the_sampler(folder: Path) -> None:
    record = Recorder()
    plain, graphed = models(folder, record)
    lengths = [5, 9, 7]
    for model in (plain, graphed):
        extend(model, lengths)
    first = graphed.launch([1, 2, 3], lengths, [Draw(seed=i, temperature=0.7) for i in range(3)], [0, 0, 0])
    assert first is not None
    drawn = first.read()
    expected = sample(plain.decode([1, 2, 3], lengths), [Draw(seed=i, temperature=0.7) for i in range(3)], [0, 0, 0])
    assert drawn.tokens == expected.tokens
    assert drawn.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    after = [n + 1 for n in lengths]
    recorded = record.recorded
    second = graphed.launch([2, 1], after[:2], [Draw(seed=4)] * 2, [1, 1], follows=True)
    assert second is not None
    drawn_next = second.read()
    assert record.recorded == recorded + 2, "another number of rows"
    expected = sample(plain.decode([drawn.tokens[2], drawn.tokens[1]], after[:2]), [Draw(seed=4)] * 2, [1, 1])
    assert drawn_next.tokens == expected.tokens
    assert drawn_next.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_step_beyond_the_cache_is_not_launched(folder: Path) -> None:
    _, graphed = models(folder, Recorder())
    extend(graphed, [5])
    length = graphed.cache.length
    assert graphed.launch([1], [length - 1], [Draw(seed=0)], [0]) is not None
    assert graphed.launch([1], [length], [Draw(seed=0)], [0]) is None


def test_a_device_without_graphs_computes_as_usual_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, graphed = models(folder, Recorder(fails=True))
    for model in (plain, graphed):
        extend(model, [5, 9])
    for step in range(2):
        positions = [5 + step, 9 + step]
        torch.testing.assert_close(graphed.decode([1, 2], positions), plain.decode([1, 2], positions))
        assert graphed.launch([1, 2], positions, [Draw(seed=0)] * 2, [0, 0]) is None
    assert caplog.text.count("without CUDA graphs") == 1


@given(st.integers(1, 600), st.integers(0, 400))
def test_batches_are_filled_up_within_the_cache(rows: int, more: int) -> None:
    filled = filled_rows(rows, rows + more)
    assert rows <= filled <= rows + more
    assert filled - rows <= max(31, rows)


@given(st.integers(1, 5000), st.integers(0, 3000))
def test_lengths_are_filled_up_within_the_cache(length: int, more: int) -> None:
    filled = filled_length(length, length + more)
    assert length <= filled <= length + more
    assert filled - length < graphs.LONG
