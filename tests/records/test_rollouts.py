"""Rollouts written and read back: whole, torn, thinned out, rewound, on a full disk, and while they are written."""

from __future__ import annotations

import errno
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import DataError
from streamrl.records import rollouts_writer
from streamrl.records.rollouts import (
    DTYPES,
    FOLDER,
    MAY_LACK,
    ROW,
    TRAINED,
    Branch,
    KeptGroup,
    Rollouts,
    branches,
    conditions,
    first_line,
    rows_of,
)
from streamrl.records.rollouts_writer import RolloutWriter
from streamrl.types import NO_VERSION


def made(step=1, seq=0, *, rewards=(1.0, 0.0), lengths=(3, 5), texts=None, finish="stop", prompt=2, seed=0, **more):
    """A group of responses of `lengths` sampled tokens behind a prompt; one character for each token."""
    random = np.random.default_rng((seed, step, seq))
    seqlens = np.array([prompt + length for length in lengths], np.int32)
    sampled = np.concatenate([np.arange(n) >= prompt for n in seqlens])
    tokens = len(sampled)

    def floats(scale=1.0):
        return np.where(sampled, scale * random.random(tokens), 0).astype(np.float32)

    return KeptGroup(
        step=step,
        seq=seq,
        time=1000.0 + step,
        worker="rollout/0",
        prompt_length=prompt,
        prompt_chars=prompt,
        finish_reasons=[finish] * len(lengths),
        texts=texts or ["?" * prompt + "x" * length for length in lengths],
        seqlens=seqlens,
        rewards=np.array(rewards, np.float32),
        episodes=np.arange(len(lengths), dtype=np.int32),
        input_ids=random.integers(0, 1000, tokens).astype(np.int32),
        text_ends=np.concatenate([np.arange(1, n + 1) for n in seqlens]).astype(np.int32),
        behavior_logprobs=-floats(),
        policy_versions=np.where(sampled, max(step - 2, 0), NO_VERSION).astype(np.int32),
        token_uses=np.where(sampled, TRAINED, 1).astype(np.uint8),
        advantages=floats(),
        proximal_logprobs=-floats(),
        **more,
    )


def keep(run_dir, groups, *, rank=0, most_bytes=2**30, version=0):
    writer = RolloutWriter(run_dir / FOLDER / f"rank-{rank}", most_bytes=most_bytes, policy_version=version)
    for group in groups:
        writer.append(group)
    writer.close()
    return writer


def same(one: KeptGroup, other: KeptGroup) -> bool:
    for name in KeptGroup.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if name in DTYPES and a is not None and b is not None:
            if a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                return False
        elif (a is None) != (b is None) or (name not in DTYPES and a != b):
            return False
    return True


@st.composite
def kept_groups(draw):
    size = draw(st.integers(1, 4))
    prompt = draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    group = made(
        step=draw(st.integers(1, 2**31 - 1)),
        seq=draw(st.integers(0, 2**62)),
        lengths=lengths,
        rewards=draw(st.lists(st.floats(-1e9, 1e9, width=32), min_size=size, max_size=size)),
        finish=draw(st.text(max_size=20)),
        texts=draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=size, max_size=size)),
        prompt=prompt,
        seed=draw(st.integers(0, 2**32)),
    )
    lacking = draw(st.sets(st.sampled_from(sorted(MAY_LACK))))
    return msgspec.structs.replace(group, **{name: None for name in lacking})


@given(group=kept_groups())
@settings(max_examples=60, deadline=None)
def test_a_group_comes_back_as_it_was(tmp_path_factory, group):
    folder = tmp_path_factory.mktemp("run")
    keep(folder, [group])
    found = Rollouts(folder)
    assert len(found) == group.size
    assert same(found.group(group.step, group.seq), group)


def test_the_figures_of_a_row():
    group = made(step=5, lengths=(2, 3), rewards=(0.5, 1.0), special=[0, 2])
    group.policy_versions[:] = [-1, -1, 3, 4, -1, -1, 1, -1, 2]
    group.token_uses[:] = [1, 1, 0, 0, 1, 1, 4, 2, 0]
    first, second = rows_of(group)
    assert (first["length"], first["turns"], first["masked"], first["age"], first["age_mean"]) == (2, 1, 0, 1, 0.5)
    assert (second["length"], second["turns"], second["masked"], second["age"], second["age_mean"]) == (2, 2, 1, 3, 2.5)
    assert second["logprob"] == pytest.approx(group.behavior_logprobs[[6, 8]].mean())
    assert first["difference_max"] == np.abs(group.proximal_logprobs - group.behavior_logprobs)[2:4].max()
    assert np.isnan(first["entropy"])
    assert (first["special"], second["special"]) == (0, 2)
    assert rows_of(msgspec.structs.replace(group, special=[]))["special"].tolist() == [0, 0]


def test_pieces_and_turns():
    group = made(lengths=(2, 1), texts=["hi höö", "hi y"])
    group.text_ends[:] = [2, 3, 3, 6, 2, 3, 4]
    assert group.pieces(0) == ["hi", " ", "", "höö"]
    assert "".join(group.pieces(1)) == "hi y"
    assert group.turns(0) == [(2, 4)]


def test_the_tree_of_an_episode():
    ids = np.array([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 9, 1, 2, 3, 4], np.int32)
    found = branches(ids, np.array([4, 3, 4, 4]), np.array([0, 0, 0, 1]))
    assert found == [Branch(-1, 0), Branch(0, 2), Branch(0, 3), Branch(-1, 0)]


def test_a_table_is_filtered_and_sorted(tmp_path):
    keep(
        tmp_path,
        [made(step, step, rewards=(step % 3, 0.25), finish="length" if step == 4 else "stop") for step in range(1, 8)],
    )
    found = Rollouts(tmp_path)
    newest = found.table(limit=3)
    assert newest.total == 14
    assert [(r.step, r.index) for r in newest.rows] == [(7, 1), (7, 0), (6, 1)]
    assert (newest.rows[0].prompt, newest.rows[0].response) == ("??", "xxxxx")
    best = found.table(sort="reward", filter="reward>=1 and index=0", limit=10)
    assert [(r.step, r.reward) for r in best.rows] == [(5, 2), (2, 2), (7, 1), (4, 1), (1, 1)]
    assert [r.step for r in found.table(sort="reward", descending=False, filter="index=0", limit=3).rows] == [3, 6, 1]
    assert [r.step for r in found.table(filter="finish=length").rows] == [4, 4]
    assert [r.step for r in found.table(filter="step>2,step<=3, finish!=length").rows] == [3, 3]
    assert found.table(offset=13, limit=5).rows[0].step == 1
    assert found.table(sort="finish", limit=1, descending=False, texts=False).rows[0].prompt == ""


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_sorting_is_sorting(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    rewards = data.draw(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
    ranks = data.draw(st.integers(1, 3))
    for rank in range(ranks):
        mine = [made(n + 1, n, rewards=(r,), lengths=(2,)) for n, r in enumerate(rewards) if n % ranks == rank]
        keep(folder, mine, rank=rank)
    found = Rollouts(folder)
    for descending in (True, False):
        rows = found.table(sort="reward", descending=descending, limit=100, texts=False).rows
        expected = sorted(enumerate(rewards), key=lambda pair: (pair[1], pair[0]), reverse=descending)
        assert [(r.seq, r.reward) for r in rows] == expected


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ("reward", "'reward' is no condition"),
        ("colour=3", "no column 'colour'; there are step, seq"),
        ("reward>high", "'high' is not a number"),
        ("finish>stop", "finish is a name"),
        ("reward>1 or step<2", "'or step<2' is no condition"),
    ],
)
def test_a_filter_that_makes_no_sense_is_an_error(filter, message):
    with pytest.raises(DataError, match=message):
        conditions(filter)


def test_a_column_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="no column 'place'"):
        Rollouts(tmp_path).table(sort="place")


def test_search_goes_on_where_it_ended(tmp_path):
    texts = [["??needle", "??hay"], ['??Häy\n"q"', "??NEEDLE"], ["??hay", "??hay"], ["??needles", "??hay"]]
    keep(tmp_path, [made(1 + n // 2, n, texts=t, lengths=(6, 6)) for n, t in enumerate(texts)])
    found = Rollouts(tmp_path)
    first = found.search("needle", limit=1)
    assert [(r.seq, r.index) for r in first.rows] == [(3, 0)]
    rest = found.search("needle", before=first.go_on)
    assert [(r.seq, r.index) for r in rest.rows] == [(1, 1), (0, 0)]
    assert (rest.go_on, rest.groups) == (None, 3)
    assert [(r.seq, r.index) for r in found.search('häy\n"Q"').rows] == [(1, 0)]
    assert found.search("needle", filter="step=1").rows == rest.rows
    assert found.search("needle", seconds=0).go_on == (2, 3)


def test_a_live_run_is_followed(tmp_path):
    found = Rollouts(tmp_path)
    assert len(found) == 0
    assert not found.refresh()
    writer = RolloutWriter(tmp_path / FOLDER / "rank-0", most_bytes=2**30, policy_version=0)
    for step in range(1, 4):
        writer.append(made(step, step))
        assert found.refresh()
        assert found.table(limit=1).rows[0].step == step
        assert same(found.group(step, step), made(step, step))
    assert not found.refresh()


@given(cut=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_what_a_crash_cut_off_is_left_out(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    keep(folder, [made(1), made(2)])
    rows, frames = (folder / FOLDER / "rank-0" / f"000001{ending}" for ending in (".rows", ".zst"))
    row_bytes, frame_bytes = rows.read_bytes(), frames.read_bytes()
    lost = min(cut, 2 * ROW.itemsize - 1)  # rows of step 2
    rows.write_bytes(row_bytes[: len(row_bytes) - lost])
    found = Rollouts(folder)
    assert len(found) == 4 - -(-lost // ROW.itemsize)
    assert same(found.group(1, 0), made(1))
    # a start after the crash begins a segment of its own
    keep(folder, [made(3)], version=3)
    found.refresh()
    assert same(found.group(1, 0), made(1))
    assert same(found.group(3, 0), made(3))
    # rows that made it to the disk without their frames, as after a power failure
    rows.write_bytes(row_bytes)
    frames.write_bytes(frame_bytes[: -min(cut, 100)])
    with pytest.raises(DataError, match=r"000001\.zst: "):
        Rollouts(folder).group(2, 0)


def test_damaged_bytes_are_found(tmp_path):
    keep(tmp_path, [made(1), made(2)])
    frames = tmp_path / FOLDER / "rank-0" / "000001.zst"
    content = bytearray(frames.read_bytes())
    content[-20] ^= 0xFF
    frames.write_bytes(content)
    found = Rollouts(tmp_path)
    assert same(found.group(1, 0), made(1))
    with pytest.raises(DataError, match=r"000001\.zst: a frame is damaged"):
        found.group(2, 0)
    assert len(found.table().rows) == 4


def test_a_resumed_run_takes_steps_back(tmp_path):
    keep(tmp_path, [made(step, step) for step in range(1, 6)])
    found = Rollouts(tmp_path)
    again = [made(step, 10 + step) for step in range(4, 7)]
    keep(tmp_path, again, version=3)
    assert found.refresh()
    assert [(r.step, r.seq) for r in found.table(filter="index=0", descending=False).rows] == [
        *((step, step) for step in range(1, 4)),
        *((group.step, group.seq) for group in again),
    ]
    assert same(found.group(6, 16), again[-1])
    with pytest.raises(DataError, match="group 5 of step 5 is not among the rollouts"):
        found.group(5, 5)
    keep(tmp_path, [made(4, 44), made(5, 45)], rank=1)
    rollouts_writer.rewind(tmp_path, policy_version=4)  # by the master: rank 1 may not be there any more
    assert found.refresh()
    assert sorted(r.seq for r in found.table(filter="index=0").rows) == [1, 2, 3, 14, 44]
    keep(tmp_path, [], version=0)
    rollouts_writer.rewind(tmp_path, policy_version=0)
    assert found.refresh()
    assert len(found) == 0


def test_a_segment_that_was_made_again_under_its_name_is_read_anew(tmp_path):
    keep(tmp_path, [made(1, 1)])
    keep(tmp_path, [made(2, 2)], version=1)
    found = Rollouts(tmp_path)
    again = [made(2, 12), made(3, 13)]
    keep(tmp_path, again[:1], version=1)  # as many rows as before: nobody looked while it was shorter
    assert found.refresh()
    assert [(r.step, r.seq) for r in found.table(filter="index=0", descending=False).rows] == [(1, 1), (2, 12)]
    keep(tmp_path, again, version=1)
    assert found.refresh()
    assert same(found.group(2, 12), again[0])
    assert same(found.group(3, 13), again[1])


@given(groups=st.integers(1, 3), steps=st.integers(20, 60), budget=st.integers(4_000, 30_000))
@settings(max_examples=20, deadline=None)
def test_the_oldest_are_thinned_out_and_the_latest_stay(tmp_path_factory, groups, steps, budget):
    folder = tmp_path_factory.mktemp("run")
    writer = RolloutWriter(folder / FOLDER / "rank-0", most_bytes=budget, policy_version=0)
    found = Rollouts(folder)
    for step in range(1, steps + 1):
        for n in range(groups):
            writer.append(made(step, groups * step + n))
        found.refresh()
        assert found.table(limit=1).rows[0].step == step
    writer.close()
    on_disk = sum(file.stat().st_size for file in (folder / FOLDER).rglob("*.*") if file.is_file())
    assert on_disk == writer.bytes
    assert on_disk <= max(budget, 3 * (budget / 16 + 3_000))
    found.refresh()
    kept = np.unique(found.rows["step"])
    assert not [file for file in (folder / FOLDER).rglob("*unfinished")]
    for step, seq in {(int(row["step"]), int(row["seq"])) for row in found.rows}:
        assert same(found.group(step, seq), made(step, seq))
    gaps = np.diff(kept)
    newest = kept[len(kept) // 2 :]
    assert newest[-1] == steps
    assert np.diff(newest).max(initial=1) <= gaps.max(initial=1)
    # a writer that goes on counts what is there
    assert RolloutWriter(folder / FOLDER / "rank-0", most_bytes=budget, policy_version=steps).bytes == writer.bytes


def test_older_is_never_denser(tmp_path):
    keep(tmp_path, [made(step, step) for step in range(1, 400)], most_bytes=60_000)
    kept = np.unique(Rollouts(tmp_path).rows["step"])
    assert kept[0] == 1
    assert kept[-1] == 399
    gaps = np.diff(kept)
    assert gaps[0] > 2
    assert (gaps[-20:] == 1).all()
    blocks = [part.mean() for part in np.array_split(gaps, 8)]
    assert all(a >= b - 1 for a, b in pairwise(blocks))


def test_a_reader_survives_thinning_under_its_hands(tmp_path):
    writer = RolloutWriter(tmp_path / FOLDER / "rank-0", most_bytes=20_000, policy_version=0)
    for step in range(1, 12):
        writer.append(made(step, step))
    found = Rollouts(tmp_path)
    for step in range(12, 200):
        writer.append(made(step, step))
    table = found.table(limit=100)  # of what it knew; texts may be gone
    assert table.total == 22
    assert same(found.group(199, 199), made(199, 199))
    with pytest.raises(DataError, match=r"thinned out since \(metrics\.rollouts_mb\)"):
        found.group(2, 2)


def test_a_full_disk_leaves_files_as_they_were(tmp_path, monkeypatch):
    folder = tmp_path / FOLDER / "rank-0"
    writer = RolloutWriter(folder, most_bytes=2**30, policy_version=0)
    writer.append(made(1))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    written = []

    def full(file, content):
        file.write(content[:7])
        written.append(content)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(content[7:])

    monkeypatch.setattr(rollouts_writer, "_write_all", full)
    with pytest.raises(OSError, match="No space"):
        writer.append(made(2))
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    writer.append(made(3))
    found = Rollouts(tmp_path)
    assert [row.step for row in found.table(filter="index=0").rows] == [3, 1]
    assert same(found.group(3, 0), made(3))


def test_files_of_a_newer_format_are_left_out_and_named(tmp_path, caplog):
    keep(tmp_path, [made(1)])
    newer = first_line(ROW).replace(b'"streamrl_rollouts": 1', b'"streamrl_rollouts": 99')
    (tmp_path / FOLDER / "rank-0" / "000002.rows").write_bytes(newer)
    found = Rollouts(tmp_path)
    assert len(found) == 2
    found.refresh()
    assert caplog.text.count("rollouts of format 99; this version of streamrl reads 1") == 1


def test_rows_with_other_columns_are_read(tmp_path):
    """A version of tomorrow may know more of a response, or less."""
    keep(tmp_path, [made(1)])
    file = tmp_path / FOLDER / "rank-0" / "000001.rows"
    _, _, rest = file.read_bytes().partition(b"\n")
    rows = np.frombuffer(rest, ROW)
    other = np.dtype([("mood", "<f4"), *(kind for kind in ROW.descr if kind[0] != "entropy")])
    new = np.zeros(len(rows), other)
    for name in other.names[1:]:
        new[name] = rows[name]
    file.write_bytes(first_line(other) + new.tobytes())
    found = Rollouts(tmp_path)
    assert [row.length for row in found.table().rows] == [5, 3]
    assert same(found.group(1, 0), made(1))


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / FOLDER).write_text("a file")
    assert len(Rollouts(tmp_path)) == 0
    (tmp_path / FOLDER).unlink()
    rank = tmp_path / FOLDER / "rank-0"
    rank.mkdir(parents=True)
    (rank / "000001.rows").write_text("nonsense")
    (rank / "notes.txt").write_text("mine")
    assert len(Rollouts(tmp_path)) == 0
