"""The progress of a run, as its checkpoints record it, and the list of these checkpoints.

A checkpoint is the folder of a Hugging Face model with one more folder in it:

    run_dir/checkpoints/step-000040/    config.json, model*.safetensors, tokenizer: the policy
                             state/progress.json    `Progress`
                             state/actor/           optimizer, schedule (docs/trainer.md lists all files)

A checkpoint does not contain groups that were generated but not trained on. Their prompts are issued again, so each
prompt is trained on exactly once in the history of the weights.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from streamrl.config import Config, DataConfig, by_task
from streamrl.config.fields import GENERATED_SOURCES
from streamrl.disk import all_to_disk, to_disk
from streamrl.errors import ConfigError, DataError
from streamrl.records import lineage as lineages
from streamrl.records import snapshots
from streamrl.records.collapse import CollapseWatch
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.records.files import read_lines, read_records
from streamrl.records.lineage import Lineage
from streamrl.records.metrics import FINAL_FILE, METRICS_FILE, StepReport
from streamrl.rows import RowsState

log = logging.getLogger(__name__)

STATE = "state"
FILE = "progress.json"
UNFINISHED = ".unfinished"
REPLACED = ".replaced"
"""Suffix of an older checkpoint of the same name, until the new one has replaced it."""

Record = TypeVar("Record")

Ranges = list[tuple[int, int]]
"""(first, last + 1), ascending."""


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run at the end of a step."""

    policy_version: int
    trained: Ranges
    """Sequence numbers that were trained on."""
    rejected: Ranges
    """Sequence numbers that were rejected."""
    prompts: str
    """Fingerprint of the settings that determine the prompt of each sequence number."""
    lineage: int = 0
    """Number of the lineage that made this version."""
    data_rows: int = 0
    """Rows of the training data; 0: not recorded."""
    data_digest: str = ""
    """Fingerprint of prompts from files; empty for generated prompts."""
    data_of_tasks: list[int] = []
    """Rows of each of [[tasks]]; empty without them."""
    reached_at: float = 0.0
    """Unix time; 0: not recorded."""
    train_seconds: float = 0.0
    """Seconds since the first step, without those in which the run was down."""
    tokens_dropped: int = 0
    evaluation_due: bool = False
    """Whether an evaluation of this version was due."""
    recent_rewards: list[float] = []
    """Mean rewards of the last steps."""
    watch: CollapseWatch = CollapseWatch()
    """Figures of earlier steps, to compare the next ones with."""
    rows: RowsState = RowsState()
    """Rows that `data.sampler` has chosen, and their results."""

    @property
    def groups_trained(self) -> int:
        return _length(self.trained)

    @property
    def groups_consumed(self) -> int:
        """Number of groups that were trained on or rejected."""
        return self.groups_trained + _length(self.rejected)

    def trained_seqs(self) -> Iterator[int]:
        """Yield the trained sequence numbers in ascending order."""
        return _members(self.trained)

    def rejected_seqs(self) -> Iterator[int]:
        """Yield the rejected sequence numbers in ascending order."""
        return _members(self.rejected)


def ranges(seqs: Iterable[int]) -> Ranges:
    """Return the distinct `seqs` as ranges."""
    found: Ranges = []
    for seq in sorted(seqs):
        if found and found[-1][1] == seq:
            found[-1] = (found[-1][0], seq + 1)
        else:
            found.append((seq, seq + 1))
    return found


def _members(found: Ranges) -> Iterator[int]:
    for first, end in found:
        yield from range(first, end)


def _length(found: Ranges) -> int:
    return sum(end - first for first, end in found)


def prompts_digest(config: Config) -> str:
    """Return the fingerprint of the settings that determine the prompt of each sequence number.

    The path of a file is not part of it, so that files may be moved. Rollout workers compare the prompts in them
    (`Progress.data_digest`).
    """
    own = [_prompt_settings(each.data) for each in by_task(config).values()]
    content = (own, [task.weight for task in config.tasks]) if config.tasks else own[0]
    return hashlib.sha256(msgspec.json.encode((config.run.seed, content))).hexdigest()[:16]


def _prompt_settings(data: DataConfig) -> dict[str, Any]:
    settings = msgspec.structs.asdict(data)
    for name in ("answer_type", "sampler", "sampler_args"):  # how a row is scored; the checkpoint has the chosen rows
        del settings[name]
    if data.source not in GENERATED_SOURCES:
        settings["path"] = ""
    return settings


def write(folder: Path, progress: Progress) -> None:
    """Add `progress` to the checkpoint in `folder`."""
    (folder / STATE).mkdir(exist_ok=True)
    (folder / STATE / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(progress)))


def read(folder: Path) -> Progress:
    """Return the progress in the checkpoint `folder`; raises `ConfigError` if it has none."""
    file = folder / STATE / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Progress)
    except OSError as error:
        raise ConfigError(
            f"run.resume_from: {folder} is no checkpoint that a run can continue from ({file}: {error.strerror}); "
            "to start a new run from its weights set model.path"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"run.resume_from: {file} cannot be read: {error}") from error


def of_run(config: Config) -> Progress | None:
    """Return the progress in `run.resume_from`, or None for a new run. Raises `ConfigError` if the checkpoint belongs
    to other prompts."""
    if config.run.resume_from is None:
        return None
    progress = read(Path(config.run.resume_from))
    if progress.prompts != prompts_digest(config):
        raise ConfigError(
            f"run.resume_from: the checkpoint {config.run.resume_from} comes from a run with another [data] section "
            "or run.seed, whose sequence numbers mean other prompts; take the settings of that run "
            "(config.toml in its folder)"
        )
    return progress


def identity(config: Config) -> str:
    """Return a fingerprint of the checkpoint in `run.resume_from`, equal for its copies; empty for a new run.

    It does not depend on the prompts, which `of_run` checks. Raises as `read` does.
    """
    if config.run.resume_from is None:
        return ""
    begun = read(Path(config.run.resume_from))
    digest = hashlib.blake2b(msgspec.json.encode(begun), digest_size=8).hexdigest()
    return f"version {begun.policy_version}, {digest}"


def checkpoints(run_dir: Path, *, abandoned: bool = False) -> list[Path]:
    """Return the checkpoints in the history of the run's present weights, on the disk and in memory, the latest last;
    `abandoned`: with those of abandoned steps before them."""
    memory = snapshots.folder_of(run_dir)
    places = [run_dir / "checkpoints", *([memory] if snapshots.is_ours(memory) else [])]
    found = [file.parent.parent for place in places for file in place.glob(f"*/{STATE}/{FILE}")]
    whole = [folder for folder in found if not folder.name.endswith(UNFINISHED)]
    age = _age_in(run_dir)
    return [folder for folder in sorted(whole, key=age) if abandoned or age(folder)[0]]


def resuming(config: Config, folder: Path) -> Config:
    """Return `config` with `folder` as the checkpoint from which the run begins."""
    run = msgspec.structs.replace(config.run, resume_from=str(folder.absolute()))
    return msgspec.structs.replace(config, run=run)


def from_latest(config: Config, *, to_disk: bool) -> Config:
    """Return `config` with `run.resume_from` the run's latest checkpoint; unchanged if the run has written none.

    `to_disk`: a checkpoint in memory is copied to the disk, for model workers on other hosts. Raises `DataError` if the
    disk is full.
    """
    if to_disk:
        copy_latest_snapshot(config.run_dir)
    found = checkpoints(config.run_dir)
    return resuming(config, found[-1]) if found else config


def begin_lineage(config: Config, *, cause: str = "") -> Lineage:
    """Record that the run begins from `run.resume_from`, or with its first weights; return its lineage.

    Checkpoints of later versions by earlier lineages are abandoned from now on. The caller then calls `rewind`. A run
    killed before that begins here again. `cause`: the death that led here, if one did. Raises as `of_run` does.
    """
    begun = of_run(config)
    steps = [step.step for step in read_records(config.run_dir / METRICS_FILE, StepReport)]
    if begun is None and not steps and not cause and not lineages.read(config.run_dir):
        return lineages.FIRST
    return lineages.begin(
        config.run_dir,
        policy_version=begun.policy_version if begun is not None else 0,
        parent=begun.lineage if begun is not None else 0,
        cause=cause,
        steps_reached=max(steps, default=0),
    )


def copy_latest_snapshot(run_dir: Path) -> None:
    """Copy the run's latest checkpoint to the disk if it is in memory. Raises `DataError` if it cannot be written."""
    found = checkpoints(run_dir)
    if found and found[-1].parent == snapshots.folder_of(run_dir):
        target = run_dir / "checkpoints" / found[-1].name
        try:
            write_folder(target, lambda folder: shutil.copytree(found[-1], folder, dirs_exist_ok=True))
        except OSError as error:
            raise DataError(
                f"the snapshot {found[-1]} cannot be copied to {target} ({error}): make room there, then continue with "
                "--resume; until then it stays in memory"
            ) from error
        log.info("%s was copied from memory", target)


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary folder, which then replaces `folder`, or is removed if `write` fails."""
    temporary = unfinished_folder(folder)
    make_anew(temporary)
    try:
        write(temporary)
        all_to_disk(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    put(temporary, folder)


def unfinished_folder(folder: Path) -> Path:
    """Return the temporary folder of `folder`."""
    return folder.with_name(folder.name + UNFINISHED)


def make_anew(folder: Path) -> None:
    """Make an empty `folder`."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def put(temporary: Path, folder: Path) -> None:
    """Replace the checkpoint `folder` by `temporary`, whose content is on the disk."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if replaced.exists():
            remove(replaced)
        folder.rename(replaced)  # a run that is killed here continues from it under this name
    temporary.rename(folder)
    if replaced.exists():
        remove(replaced)
    to_disk(folder.parent)


def prune(folder: Path, *, keep: int, spare: str | None, run_dir: Path | None = None) -> None:
    """Remove all but the `keep` latest checkpoints in `folder`, abandoned ones first.

    These stay in any case: the checkpoint from which the run was started or resumed last, since its launcher restarts
    processes from it; `spare`, from whose folder settings and tokenizer are copied; on the disk also the last one of
    the run when it was healthy, since a run that collapses has to continue from it. `run_dir`: folder of the run, by
    default the parent of `folder`.
    """
    for path in folder.glob(f"*{UNFINISHED}"):  # a killed run was writing or removing these
        _clear(path)
    whole = [path for path in folder.glob("step-*") if not path.name.endswith(UNFINISHED)]
    run_dir = run_dir or folder.parent
    found = sorted(whole, key=_age_in(run_dir))
    healthy = _last_healthy(found) if folder.parent == run_dir else None
    started = [lineage for lineage in lineages.read(run_dir) if not lineage.cause][-1:]
    for old in found[:-keep]:
        if old == healthy or (spare is not None and old.resolve() == Path(spare).resolve()):
            continue
        if any(old.name == f"step-{lineage.policy_version:06d}" for lineage in started):
            continue
        remove(old)
        log.info("removed %s: %d newer ones are kept", old, keep)


def remove(folder: Path) -> None:
    """Rename a checkpoint to an unfinished one, then remove it. So no run continues from a partly removed one."""
    for left in folder.parent.glob(f"{folder.name}-*{UNFINISHED}"):
        _clear(left)
    gone = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:8]}{UNFINISHED}")  # earlier ones may still exist
    folder.rename(gone)
    _clear(gone)


def _clear(gone: Path) -> None:
    """Remove `gone`, or log a warning: the next checkpoint must not fail because an old one cannot be removed."""
    try:
        shutil.rmtree(gone)
    except OSError as error:  # for example NFS, while another process reads a file there
        log.warning("%s cannot be removed now: %s", gone, error)


def last_healthy(run_dir: Path) -> Path | None:
    """Return the last checkpoint on the disk that was written while the run was healthy, if there is one."""
    return _last_healthy([folder for folder in checkpoints(run_dir) if folder.parent != snapshots.folder_of(run_dir)])


def _last_healthy(folders: Sequence[Path]) -> Path | None:
    """Return the last of `folders` in which a run was healthy. Folders that cannot be read are skipped."""
    for folder in reversed(folders):
        try:
            if read(folder).watch.health.state == "healthy":
                return folder
        except ConfigError:
            continue
    return None


def _age_in(run_dir: Path) -> Callable[[Path], tuple[bool, int, bool, str]]:
    """Return a sort key for the checkpoints of a run: abandoned ones first, then by version, in memory before on disk,
    and by name."""
    known = lineages.read(run_dir)

    def age(folder: Path) -> tuple[bool, int, bool, str]:
        on_disk = folder.parent != snapshots.folder_of(run_dir)
        try:
            reached = read(folder)
        except ConfigError:
            return False, 0, on_disk, folder.name
        of_the_run = lineages.in_history(known, policy_version=reached.policy_version, lineage=reached.lineage)
        return of_the_run, reached.policy_version, on_disk, folder.name

    return age


def rewind(run_dir: Path, *, policy_version: int) -> None:
    """Remove the records of steps after `policy_version`, which will be made again.

    An evaluation is removed if a later policy took part in it.
    """
    (run_dir / FINAL_FILE).unlink(missing_ok=True)
    _keep_lines(run_dir / METRICS_FILE, StepReport, lambda step: step.step <= policy_version)
    _keep_lines(
        run_dir / EVALUATIONS_FILE,
        EvaluationReport,
        lambda found: max(found.policy_version, found.newest_version or 0) <= policy_version,
    )


def figures_to_disk(run_dir: Path) -> None:
    """Wait until the figures of all steps and evaluations so far are on the disk: of those that a checkpoint counts,
    before it is there. Not where they are written, which would hold every step up.

    Whoever wrote them, on this machine; where they are on another one's disk nothing is done. Raises `OSError`.
    """
    found = [file for name in (METRICS_FILE, EVALUATIONS_FILE) if (file := run_dir / name).exists()]
    for file in found:
        to_disk(file)
    if found:
        to_disk(run_dir)


def evaluated(run_dir: Path, *, policy_version: int) -> bool:
    """Whether the run's records hold an evaluation of `policy_version`."""
    reports = read_records(run_dir / EVALUATIONS_FILE, EvaluationReport)
    return any(report.policy_version == policy_version for report in reports)


def _keep_lines(file: Path, kind: type[Record], keep: Callable[[Record], bool]) -> None:
    """Remove from `file`, if there is one, the lines for which `keep` is false and those that cannot be read."""
    if not file.exists():
        return
    kept = [line for line, record in read_lines(file, kind) if keep(record)]
    _replace(file, b"".join(line + b"\n" for line in kept))


def _replace(file: Path, content: bytes) -> None:
    unfinished = file.with_name(file.name + UNFINISHED)
    unfinished.write_bytes(content)
    to_disk(unfinished)  # else a loss of power may leave an empty file in the place of all figures
    unfinished.rename(file)
