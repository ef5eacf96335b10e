"""Lineages: the policy versions that a run has made, and which of them its present weights descend from.

After the death of its controller or of a model worker, a run goes back to its latest checkpoint and makes the later
steps again: a *rewind*. A run that is resumed does the same. Each such beginning is a lineage with its own number, and
a policy version is identified by its number together with the number of the lineage that made it. The later steps of
earlier lineages are abandoned: no checkpoint and no gserver with their weights may be mistaken for a new one.

    run_dir/lineages.jsonl      a line for each `Lineage` after the first, oldest first; a further line for one that has
                                kept groups, at its first step
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.disk import to_disk
from streamrl.errors import DataError
from streamrl.records.files import LineFile, read_records

LINEAGES_FILE = "lineages.jsonl"


class Lineage(msgspec.Struct, frozen=True):
    """A beginning of the run, and the weights that it begins with."""

    number: int = 0
    policy_version: int = 0
    """Policy version of the weights that it begins with."""
    parent: int = 0
    """Number of the lineage that made these weights."""
    time: float = 0.0
    """Time of its beginning, in seconds since the epoch."""
    cause: str = ""
    """The death that made the run go back; empty: the run was started, or resumed."""
    steps_lost: int = 0
    """Steps of earlier lineages that are repeated."""
    groups_kept: int = 0
    """Groups that rollout workers had in hand when it began, and that were not generated again."""

    def maker(self, policy_version: int) -> int:
        """Return the number of the lineage that made `policy_version`, one that this lineage begins with or makes."""
        return self.parent if policy_version <= self.policy_version else self.number

    def label(self, policy_version: int) -> str:
        """Return a gserver's name for the weights of `policy_version`; as `maker`."""
        return label_of(policy_version, self.maker(policy_version))


FIRST = Lineage()


def label_of(policy_version: int, lineage: int) -> str:
    """Return a gserver's name for the weights of a version that was made by the lineage with this number."""
    return f"{policy_version}.{lineage}" if lineage else str(policy_version)


def version_of(label: str) -> int:
    """Return the policy version of weights that a gserver calls `label`; raises `ValueError` for other names."""
    version, dot, lineage = label.partition(".")
    if not (label.isascii() and version.isdigit()) or (dot and not lineage.isdigit()):
        raise ValueError(f"{label!r} names no policy version")
    return int(version)


def read(run_dir: Path) -> list[Lineage]:
    """Return the lineages of the run, oldest first; the first one has no record unless it began from a checkpoint."""
    return list({lineage.number: lineage for lineage in read_records(run_dir / LINEAGES_FILE, Lineage)}.values())


def begin(run_dir: Path, *, policy_version: int, parent: int, cause: str, steps_reached: int) -> Lineage:
    """Record a further lineage, and return it.

    `parent`: the lineage of the checkpoint that it begins from; `steps_reached`: the last step in the run's records.
    Raises `DataError` if the record cannot be written: without it abandoned checkpoints would count again.
    """
    before = read(run_dir)
    lineage = Lineage(
        number=1 + max([parent, *(each.number for each in before)]),
        policy_version=policy_version,
        parent=parent,
        time=time.time(),
        cause=cause,
        steps_lost=max(0, steps_reached - policy_version),
    )
    file = _append(run_dir, lineage)
    if read(run_dir)[-1:] != [lineage]:
        raise DataError(f"{file} cannot be written; make room there, and start the run again with --resume")
    to_disk(file)
    return lineage


def record_kept(run_dir: Path, lineage: Lineage, *, groups: int) -> None:
    """Add the number of groups that `lineage`, the newest one, has kept to its record."""
    _append(run_dir, msgspec.structs.replace(lineage, groups_kept=groups))


def _append(run_dir: Path, lineage: Lineage) -> Path:
    file = LineFile(run_dir / LINEAGES_FILE)
    file.append(msgspec.json.encode(lineage))
    file.close()
    return file.path


class LineageHistory(msgspec.Struct, frozen=True):
    """The lineages of a run up to the present one, for a process that has no access to the run's folder."""

    lineages: list[Lineage] = []

    def label(self, policy_version: int) -> str:
        """Return the name at gservers of the weights of `policy_version`, one that the present lineage begins with or
        makes."""
        return (self.lineages[-1] if self.lineages else FIRST).label(policy_version)

    def has(self, label: str) -> bool:
        """Return whether the weights that a gserver calls `label` are in the history of the present ones; raises
        `ValueError` as `version_of`."""
        lineage = int(label.partition(".")[2] or 0)
        return in_history(self.lineages, policy_version=version_of(label), lineage=lineage)


def in_history(lineages: Sequence[Lineage], *, policy_version: int, lineage: int) -> bool:
    """Return whether the weights of `policy_version` that `lineage` made are an ancestor of the newest lineage's, or
    its own."""
    known = {each.number: each for each in lineages}
    current = lineages[-1] if lineages else FIRST
    while current.number != lineage:
        if policy_version > current.policy_version or current.number not in known:
            return False
        current = known.get(current.parent, Lineage(number=current.parent))
    return policy_version >= current.policy_version
