"""Rollouts written and read back: whole, by other programs, torn, beyond the budget, rewound, and on a full disk."""

from __future__ import annotations

import contextlib
import errno

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import DataError
from streamrl.records import rollouts_writer
from streamrl.records.rollouts import (
    ARRAYS,
    FOLDER,
    FORMAT_KEY,
    SCHEMA,
    TRAINED,
    Branch,
    KeptGroup,
    Rollouts,
    branches,
    passing,
    rows_of,
)
from streamrl.records.rollouts_writer import RolloutWriter
from streamrl.types import NO_VERSION

MAY_LACK = ("advantages", "proximal_logprobs", "ref_logprobs", "values", "entropies")


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


def keep(run_dir, groups, *, rank=0, most_bytes=2**30, version=0, per_file=1):
    writer = RolloutWriter(run_dir / FOLDER / f"rank-{rank}", most_bytes=most_bytes, policy_version=version)
    for group in groups:
        writer.append(group)
        if writer.pending == per_file:
            writer.write()
    writer.write()
    return writer


def files_in(run_dir):
    return sorted((run_dir / FOLDER / "rank-0").iterdir())


def steps_of(rollouts):
    return sorted(set(rollouts.rows["step"].to_pylist()))


def same(one: KeptGroup, other: KeptGroup) -> bool:
    for name in KeptGroup.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                return False
        elif a != b:
            return False
    return True


@st.composite
def kept_groups(draw):
    size = draw(st.integers(1, 4))
    prompt = draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    group = made(
        step=draw(st.integers(1, 2**31 - 1)),
        special=draw(st.sampled_from([[], [1] * size])),
        scores=draw(st.sampled_from([[], [0.5] * size])),
        reward_parts=draw(st.sampled_from([[], [{"right": 1.0, "short": -0.5}] * size])),
        seq=draw(st.integers(0, 2**62)),
        lengths=lengths,
        rewards=draw(st.lists(st.floats(-1e9, 1e9, width=32), min_size=size, max_size=size)),
        finish=draw(st.text(max_size=20)),
        texts=["?" * prompt + draw(st.text(st.characters(exclude_categories=["Cs"]))) for _ in range(size)],
        prompt=prompt,
        seed=draw(st.integers(0, 2**32)),
    )
    lacking = draw(st.sets(st.sampled_from(MAY_LACK)))
    return msgspec.structs.replace(group, **{name: None for name in lacking})


@given(group=kept_groups())
@settings(max_examples=60, deadline=None)
def test_a_group_comes_back_as_it_was(tmp_path_factory, group):
    folder = tmp_path_factory.mktemp("run")
    keep(folder, [group])
    found = Rollouts(folder)
    assert len(found) == group.size
    assert same(found.group(group.step, group.seq), group)


def test_a_user_reads_the_folder_with_other_programs(tmp_path):
    """As docs/rollouts.md shows it: no code of streamrl is needed."""
    groups = [made(step, step, rewards=(step % 3, 0.25), reward_parts=[{"right": 0.5}] * 2) for step in range(1, 8)]
    keep(tmp_path, groups[:4], per_file=2)
    keep(tmp_path, groups[4:], rank=1, per_file=2)
    (tmp_path / FOLDER / "rank-1" / ".000009.parquet.unfinished").write_bytes(b"PAR1 half a file")
    frame = pd.read_parquet(tmp_path / FOLDER)
    assert len(frame) == 14
    best = frame[frame.reward >= 1].sort_values(["reward", "step"])
    assert best.step.tolist() == [1, 4, 7, 2, 5]
    row = frame[(frame.step == 6) & (frame["index"] == 1)].iloc[0]
    first, end = groups[5].bounds(1)
    assert (row.prompt, row.response, row.entropy, dict(row.reward_parts)) == ("??", "xxxxx", None, {"right": 0.5}) or (
        np.isnan(row.entropy) and (row.prompt, row.response) == ("??", "xxxxx")
    )
    np.testing.assert_array_equal(row.behavior_logprobs, groups[5].behavior_logprobs[first:end])
    table = pq.read_table(tmp_path / FOLDER, columns=["step", "input_ids"], filters=[("step", ">", 6)])
    assert [len(ids) for ids in table["input_ids"].to_pylist()] == [5, 7]


def test_the_figures_of_a_row():
    group = made(step=5, lengths=(2, 3), rewards=(0.5, 1.0), special=[0, 2])
    group.policy_versions[:] = [-1, -1, 3, 4, -1, -1, 1, -1, 2]
    group.token_uses[:] = [1, 1, 0, 0, 1, 1, 4, 2, 0]
    first, second = rows_of(group).to_pylist()
    assert (first["length"], first["turns"], first["masked"], first["age"], first["age_mean"]) == (2, 1, 0, 1, 0.5)
    assert (second["length"], second["turns"], second["masked"], second["age"], second["age_mean"]) == (2, 2, 1, 3, 2.5)
    assert second["logprob"] == pytest.approx(group.behavior_logprobs[[6, 8]].mean())
    assert first["difference_max"] == np.abs(group.proximal_logprobs - group.behavior_logprobs)[2:4].max()
    assert first["entropy"] is None
    assert (first["special"], second["special"]) == (0, 2)


def test_pieces():
    group = made(lengths=(2, 1), texts=["hi höö", "hi y"])
    group.text_ends[:] = [2, 3, 3, 6, 2, 3, 4]
    assert group.pieces(0) == ["hi", " ", "", "höö"]
    assert "".join(group.pieces(1)) == "hi y"


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
    assert [(r["step"], r["index"]) for r in newest.rows] == [(7, 1), (7, 0), (6, 1)]
    assert (newest.rows[0]["prompt"], newest.rows[0]["response"]) == ("??", "xxxxx")
    best = found.table(sort="reward", filter="reward>=1 and index=0", limit=10)
    assert [(r["step"], r["reward"]) for r in best.rows] == [(5, 2), (2, 2), (7, 1), (4, 1), (1, 1)]
    assert [r["step"] for r in found.table(sort="reward", descending=False, filter="index=0", limit=3).rows] == [
        3,
        6,
        1,
    ]
    assert [r["step"] for r in found.table(filter="finish=length").rows] == [4, 4]
    assert [r["step"] for r in found.table(filter="step>2,step<=3, finish!=length").rows] == [3, 3]
    assert found.table(offset=13, limit=5).rows[0]["step"] == 1
    assert found.table(sort="finish", limit=1, descending=False, texts=False).rows[0]["finish"] == "length"


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_sorting_is_sorting(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    rewards = data.draw(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
    ranks = data.draw(st.integers(1, 3))
    for rank in range(ranks):
        mine = [made(n + 1, n, rewards=(r,), lengths=(2,)) for n, r in enumerate(rewards) if n % ranks == rank]
        keep(folder, mine, rank=rank, per_file=4)
    found = Rollouts(folder)
    for descending in (True, False):
        rows = found.table(sort="reward", descending=descending, limit=100, texts=False).rows
        expected = sorted(enumerate(rewards), key=lambda pair: (pair[1], pair[0]), reverse=descending)
        assert [(r["seq"], r["reward"]) for r in rows] == expected


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
        passing(SCHEMA.empty_table(), filter)


def test_a_column_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="no column 'input_ids'"):
        Rollouts(tmp_path).table(sort="input_ids")


def test_search_goes_on_where_it_ended(tmp_path):
    texts = [["??needle", "??hay"], ['??Häy\n"q"', "??NEEDLE"], ["??hay", "??hay"], ["??needles", "??hay"]]
    keep(tmp_path, [made(1 + n // 2, n, texts=t, lengths=(6, 6)) for n, t in enumerate(texts)])
    found = Rollouts(tmp_path)
    first = found.search("needle", limit=1)
    assert [(r["seq"], r["index"]) for r in first.rows] == [(3, 0)]
    rest = found.search("needle", before=first.resume_at)
    assert [(r["seq"], r["index"]) for r in rest.rows] == [(1, 1), (0, 0)]
    assert (rest.resume_at, rest.groups) == (None, 3)
    assert [(r["seq"], r["index"]) for r in found.search('häy\n"Q"').rows] == [(1, 0)]
    assert found.search("needle", filter="step=1").rows == rest.rows
    assert found.search("needle", seconds=0).resume_at == (2, 3)


def test_a_live_run_is_followed(tmp_path):
    found = Rollouts(tmp_path)
    assert len(found) == 0
    assert not found.refresh()
    writer = RolloutWriter(tmp_path / FOLDER / "rank-0", most_bytes=2**30, policy_version=0)
    for step in range(1, 4):
        writer.append(made(step, step))
        assert not found.refresh()
        writer.write()
        assert found.refresh()
        assert found.table(limit=1).rows[0]["step"] == step
        assert same(found.group(step, step), made(step, step))
    writer.append(made(4, 4))
    writer.write()
    assert same(found.group(4, 4), made(4, 4)), "a group is looked for in new files, too"


@given(damage=st.data())
@settings(max_examples=20, deadline=None)
def test_a_torn_or_damaged_file_costs_its_own_rows_only(tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("run")
    keep(folder, [made(1), made(2)])
    file = files_in(folder)[1]
    content = bytearray(file.read_bytes())
    if damage.draw(st.booleans(), label="torn"):
        del content[damage.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[damage.draw(st.integers(0, len(content) - 1))] ^= 0xFF
    file.write_bytes(content)
    found = Rollouts(folder)
    assert same(found.group(1, 0), made(1))
    found.table()
    found.search("x")
    with contextlib.suppress(DataError):
        assert found.group(2, 0).size == 2
    keep(folder, [made(3)], version=2)  # the start after the crash
    assert found.refresh()
    assert same(found.group(3, 0), made(3))


def test_a_resumed_run_removes_abandoned_steps(tmp_path):
    keep(tmp_path, [made(step, step) for step in range(1, 6)], per_file=2)
    found = Rollouts(tmp_path)
    again = [made(step, 10 + step) for step in range(4, 7)]
    keep(tmp_path, again, version=3)
    assert found.refresh()
    assert [(r["step"], r["seq"]) for r in found.table(filter="index=0", descending=False).rows] == [
        *((step, step) for step in range(1, 4)),
        *((group.step, group.seq) for group in again),
    ]
    for group in (made(3, 3), again[-1]):
        assert same(found.group(group.step, group.seq), group)
    with pytest.raises(DataError, match="group 5 of step 5 is not among the rollouts"):
        found.group(5, 5)
    keep(tmp_path, [made(4, 44), made(5, 45)], rank=1)
    rollouts_writer.rewind(tmp_path, policy_version=4)  # by the master: rank 1 may not be there any more
    assert found.refresh()
    assert sorted(r["seq"] for r in found.table(filter="index=0").rows) == [1, 2, 3, 14, 44]
    rollouts_writer.rewind(tmp_path, policy_version=0)
    assert found.refresh()
    assert len(found) == 0


def test_a_file_that_was_replaced_under_its_name_is_read_again(tmp_path):
    keep(tmp_path, [made(1, 1), made(2, 2)])
    found = Rollouts(tmp_path)
    again = made(2, 12)
    keep(tmp_path, [again], version=1)
    assert [row["response"] for row in found.table(limit=2).rows] == ["", ""], "texts of other responses"
    assert found.refresh()
    assert [(r["step"], r["seq"]) for r in found.table(filter="index=0", descending=False).rows] == [(1, 1), (2, 12)]
    assert same(found.group(2, 12), again)


@given(steps=st.integers(4, 20), budget=st.integers(40_000, 200_000), per_file=st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_the_oldest_files_are_removed_beyond_the_budget(tmp_path_factory, steps, budget, per_file):
    folder = tmp_path_factory.mktemp("run")
    writer = keep(folder, [made(step, step) for step in range(1, steps + 1)], most_bytes=budget, per_file=per_file)
    assert writer.bytes == sum(file.stat().st_size for file in files_in(folder)) <= budget
    found = Rollouts(folder)
    kept = steps_of(found)
    assert kept == list(range(kept[0], steps + 1))
    assert same(found.group(steps, steps), made(steps, steps))
    assert RolloutWriter(folder / FOLDER / "rank-0", most_bytes=budget, policy_version=steps).bytes == writer.bytes


def test_a_reader_survives_the_removal_of_files(tmp_path):
    groups = [made(step, step) for step in range(1, 30)]
    keep(tmp_path, groups[:4])
    found = Rollouts(tmp_path)
    keep(tmp_path, groups[4:], most_bytes=50_000, version=4)
    assert [row["response"] for row in found.table(limit=100).rows] == [""] * 8
    assert same(found.group(29, 29), groups[-1])
    with pytest.raises(DataError, match=r"was removed since \(metrics\.rollouts_mb\)"):
        found.group(2, 2)


def test_groups_fill_a_file(tmp_path):
    writer = RolloutWriter(tmp_path / FOLDER / "rank-0", most_bytes=2**30, policy_version=0)
    group = made(lengths=(40_000, 40_000))
    while not writer.full:
        writer.append(group)
    assert 2 <= writer.pending <= 8


def test_a_full_disk_leaves_files_as_they_were(tmp_path, monkeypatch):
    folder = tmp_path / FOLDER / "rank-0"
    writer = RolloutWriter(folder, most_bytes=2**30, policy_version=0)
    writer.append(made(1))
    writer.write()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full(table, where, **options):
        where.write_bytes(b"PAR1 half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    writer.append(made(2))
    with pytest.raises(OSError, match="No space"):
        writer.write()
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    writer.append(made(3))
    writer.write()
    assert steps_of(Rollouts(tmp_path)) == [1, 3]


def test_a_file_of_another_format_is_left_out_and_named_once(tmp_path, caplog):
    keep(tmp_path, [made(1), made(2)])
    newer = pa.Table.from_batches([rows_of(made(3))]).replace_schema_metadata({FORMAT_KEY: b"99"})
    pq.write_table(newer, tmp_path / FOLDER / "rank-0" / "000003.parquet")
    found = Rollouts(tmp_path)
    assert steps_of(found) == [1, 2]
    found.refresh()
    assert caplog.text.count("format 99") == 1


def test_files_with_other_columns_are_read(tmp_path):
    """Another version may record more of a response, or less."""
    keep(tmp_path, [made(1)])
    rows = pa.Table.from_batches([rows_of(made(2))]).drop_columns(["logprob", "advantages", "score"])
    rows = rows.append_column("mood", pa.array([1, 2])).replace_schema_metadata(SCHEMA.metadata)
    pq.write_table(rows, tmp_path / FOLDER / "rank-0" / "000002.parquet")
    found = Rollouts(tmp_path)
    assert [row["logprob"] is None for row in found.table().rows] == [True, True, False, False]
    assert found.group(2, 0).advantages is None


def test_the_former_format_is_refused(tmp_path):
    rank = tmp_path / FOLDER / "rank-0"
    rank.mkdir(parents=True)
    (rank / "000001.rows").write_text("{}")
    with pytest.raises(DataError, match="an earlier version"):
        Rollouts(tmp_path)
    with pytest.raises(DataError, match=r"move .*rollouts out of"):
        rollouts_writer.rewind(tmp_path, policy_version=1)


def test_other_files_are_ignored(tmp_path):
    (tmp_path / FOLDER).write_text("a file")
    assert len(Rollouts(tmp_path)) == 0
    (tmp_path / FOLDER).unlink()
    rank = tmp_path / FOLDER / "rank-0"
    rank.mkdir(parents=True)
    (rank / "000001.parquet").write_text("nonsense")
    (rank / "notes.txt").write_text("mine")
    assert len(Rollouts(tmp_path)) == 0


def test_every_array_has_a_field(tmp_path):
    assert set(ARRAYS) <= set(KeptGroup.__struct_fields__)
