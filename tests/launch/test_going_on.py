"""Where a pool begins that is started again: where the controller does, whatever else is on the disk by then."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from streamrl.config import Config, load, to_toml
from streamrl.errors import ConfigError, PeerError
from streamrl.launch.role import resumed_there
from streamrl.records import lineage as lineages
from streamrl.records import progress, snapshots
from streamrl.records.progress import Progress
from streamrl.transport.control import FinishRun, Role
from tests.gserver.harness import Run, managed, small_config


def written(config: Config, version: int, *, trained: int | None = None) -> Path:
    """A checkpoint of the run's present lineage at `version`."""
    folder = config.run_dir / "checkpoints" / f"step-{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    reached = Progress(
        version,
        trained=[(0, 2 * version if trained is None else trained)],
        rejected=[],
        prompts=progress.prompts_digest(config),
        lineage=max((lineage.number for lineage in lineages.read(config.run_dir)), default=0),
    )
    progress.write(folder, reached)
    return folder


def going_on(config: Config, folder: Path) -> Config:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, resume_from=str(folder)))


def file_of(config: Config, folder: Path) -> Path:
    file = folder / "config.toml"
    file.write_text(to_toml(config))
    return file


def from_latest(file: Path, *, to_disk: bool = True) -> str | None:
    return progress.from_latest(load(file), to_disk=to_disk).run.resume_from


async def taken(run: Run, file: Path, *, needed: bool) -> str | None:
    return (await resumed_there(load(file), manager_url=run.url, needed=needed)).run.resume_from


async def test_all_go_on_from_the_controllers_checkpoint_though_there_is_a_newer_one(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    file = file_of(config, tmp_path)
    older = written(config, 4)
    assert from_latest(file) == str(older)
    async with managed(going_on(config, older)) as run:
        written(config, 8)  # by a trainer that has not noticed yet that its controller was gone
        for needed in (True, False):
            assert await taken(run, file, needed=needed) == str(older)


def test_a_snapshot_is_copied_to_the_disk_for_model_workers_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (snapshots.folder_of, snapshots.in_use):
        monkeypatch.setitem(function.__kwdefaults__, "root", tmp_path / "memory")
    config = small_config(tmp_path)
    file = file_of(config, tmp_path)
    written(config, 4)
    (snapshot := snapshots.folder_of(config.run_dir)).mkdir(parents=True)
    snapshot.chmod(0o700)
    shutil.copytree(written(config, 6), snapshot / "step-000006")
    shutil.rmtree(config.run_dir / "checkpoints" / "step-000006")
    assert from_latest(file, to_disk=False) == str(snapshot / "step-000006")
    assert from_latest(file) == str(config.run_dir.absolute() / "checkpoints" / "step-000006")


async def test_a_run_that_begins_from_a_checkpoint_of_another_one_is_joined_with_resume(tmp_path: Path) -> None:
    """Clusters give all commands --resume, and the checkpoint stands in the configuration."""
    config = small_config(tmp_path)
    theirs = written(config, 4)
    branch = going_on(config, theirs)
    branch = msgspec.structs.replace(branch, run=msgspec.structs.replace(branch.run, name="branch"))
    file = file_of(branch, tmp_path)
    assert from_latest(file) == str(theirs)
    async with managed(branch) as run:
        for needed in (True, False):
            assert await taken(run, file, needed=needed) == str(theirs)
    own = written(branch, 8)
    assert from_latest(file) == str(own)
    async with managed(going_on(branch, own)) as run:
        assert await taken(run, file, needed=True) == str(own)


async def test_a_rollout_worker_with_its_prompts_in_another_place_goes_on_too(tmp_path: Path) -> None:
    """Where files are belongs to a machine, be the checkpoint on a disk that all share or not."""
    config = small_config(tmp_path, data={"source": "jsonl", "path": "train.jsonl"})
    checkpoint = written(config, 4)
    async with managed(going_on(config, checkpoint)) as run:
        there = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, path="/local/train.jsonl"))
        assert await taken(run, file_of(there, tmp_path), needed=False) == str(checkpoint)


async def test_whoever_lacks_the_controllers_checkpoint_is_told_and_one_who_can_do_without_begins(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    file = file_of(config, tmp_path)
    async with managed(going_on(config, written(config, 4))) as run:
        written(config, 4, trained=5)  # of the same name, and another one
        with pytest.raises(
            ConfigError,
            match=r"the controller continues from step-000004 \(version 4, .*bring a copy of it",
        ):
            await taken(run, file, needed=True)
        assert await taken(run, file, needed=False) is None


async def test_a_controller_that_begins_anew_takes_all_others_with_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    async with managed(config) as run:
        written(config, 4)
        assert await taken(run, file_of(config, tmp_path), needed=True) is None


async def test_nobody_goes_on_from_where_a_run_that_is_over_began(tmp_path: Path) -> None:
    """The next one may go on from another checkpoint: it is waited for."""
    config = small_config(tmp_path, limits={"start_seconds": 0.3, "silence_seconds": 30.0})
    async with managed(config) as run:
        await run.register("rollout")  # a member without the news keeps the controller there
        await run.client.finish_run(FinishRun(reason="enough"))
        with pytest.raises(PeerError, match="this run is over"):
            await taken(run, file_of(config, tmp_path), needed=True)


async def test_a_trainer_that_counts_from_elsewhere_than_the_ledger_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    older, newer = written(config, 4), written(config, 8)
    async with managed(going_on(config, older)) as run:

        async def join(begins_from: str, **more: str) -> str:
            return (await run.register("model_worker", begins_from=begins_from, **more)).lineage

        mine, theirs = progress.identity(going_on(config, newer)), progress.identity(going_on(config, older))
        with pytest.raises(
            PeerError, match=r"continues from version 8, \w+, and the controller from version 4, \w+: start"
        ):
            await join(mine)
        with pytest.raises(PeerError, match="continues from no checkpoint, and the controller from version 4"):
            await join("")
        with pytest.raises(PeerError, match="has trained in a lineage that the run has gone back behind"):
            await join(theirs, joined_before="0123456789abcdef")
        lineage = await join(theirs)
        assert await join(theirs, joined_before=lineage) == lineage, "this one had not known it for a moment"
        await run.register("rollout")  # has no part in it


async def test_all_but_model_workers_join_whatever_they_were_in_before(tmp_path: Path) -> None:
    """They are given the lineage that they are in now, and drop what they made for another."""
    config = small_config(tmp_path)
    roles: tuple[Role, ...] = ("rollout", "gserver")
    async with managed(config) as run:
        for role in roles:
            lineage = (await run.register(role, joined_before="0123456789abcdef")).lineage
            assert lineage not in ("", "0123456789abcdef")
            assert (await run.register(role, joined_before=lineage)).lineage == lineage
