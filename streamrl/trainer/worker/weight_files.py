"""Carriers that leave weights where gservers read them: in safetensors files, on a disk that all hosts share or in
memory of this host, or in memory of their GPU.

`WeightFiles` owns the folder of one run. A version appears there at once or not at all, and stays until the version
after the next one is written, so a gserver may read the latest version at any time. The version before the latest is
overwritten (new memory costs as much time as writing the weights), unless a process still reads it. The folder is
removed at the end of the run; files of a killed run are removed by the next run (in shared memory: files of any run
whose process is gone).
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from streamrl import cuda_memory
from streamrl.checksum import LineSums, checksums, copy_and_sum
from streamrl.cuda_memory import Share, SharedWeights, WeightPlace
from streamrl.device import SideStream
from streamrl.disk import OWNER, to_disk
from streamrl.errors import PublicationError
from streamrl.lora import SETTINGS, TENSORS
from streamrl.machine import SHARED_MEMORY, machine_identity
from streamrl.safetensors_files import Copiers, layout
from streamrl.trainer.worker.weight_source import Weights
from streamrl.transport.control import PublishBeginReply, Snapshot

log = logging.getLogger(__name__)

PREFIX = "streamrl-"
UNOWNED_SECONDS = 3600.0
"""Age in seconds from which an empty folder without an `OWNER` is removed; a younger one may be about to get its
owner."""
FILE = "model.safetensors"
PRIVATE, SHARED = 0o600, 0o666
"""Permissions of files in memory, and of files on a disk, where the umask restricts reading by others."""


class WeightFiles:
    """Writer of one version after another."""

    reads_once = True

    def __init__(
        self,
        run_dir: Path,
        *,
        on_disk: bool,
        dtype: torch.dtype,
        checksum: bool,
        adapter: Mapping[str, Any] | None = None,
        root: Path = SHARED_MEMORY,
    ) -> None:
        """Claim an empty folder in `run_dir`, or in `root`, this host's memory.

        `on_disk`: each version is on the disk before it appears. In memory other users can neither guess nor take the
        folder's name in advance, nor read the files; files that dead runs of the same user left there are removed.
        `adapter`: the content of `adapter_config.json`, if the weights are an adapter's.
        """
        self._adapter = adapter
        self._file_name = FILE if adapter is None else f"{TENSORS}.safetensors"
        self.dtype = dtype
        self.folder = (run_dir / "weights").absolute() if on_disk else folder_in_memory(run_dir.name, root=root)
        self._on_disk = on_disk
        self._checksum = checksum
        self._latest = self.folder
        self._sums: dict[str, str] = {}
        self._lock = claim(self.folder)
        self.sent_bytes = 0
        self._copiers = Copiers()
        self._files: dict[Path, _MappedFile] = {}
        """The files that may be overwritten, by their folders."""

    def prepare(self, version: int, weights: Weights) -> None:
        """Write `weights` as `version`; raises `PublicationError` if there is no room."""
        target = self.folder / f"v{version:06d}"
        if target == self._latest:
            return
        unfinished = self.folder / f".v{version:06d}.unfinished"
        try:
            self._make_folder(unfinished)
            if self._adapter is not None:
                (unfinished / SETTINGS).write_text(json.dumps(self._adapter))
            self._sums = self._write(unfinished, weights)
            if self._on_disk:
                to_disk(unfinished)
            self._rename(unfinished, target)
            if self._on_disk:
                to_disk(self.folder)
        except OSError as error:
            raise PublicationError(f"weights v{version} cannot be written: {error}") from error
        self._latest = target

    def announce(self) -> Snapshot:
        """Return the folder of the latest version."""
        machine = "" if self._on_disk else machine_identity()
        return Snapshot(folder=str(self._latest), machine=machine, adapter=self._adapter is not None)

    def send(self, begin: PublishBeginReply) -> dict[str, str]:
        """Return the checksums; the files are complete already."""
        return self._sums

    def abort(self) -> None:
        """Do nothing: a failed attempt leaves the files valid."""

    def close(self) -> None:
        """Remove the files."""
        for folder in list(self._files):
            self._close_file(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _make_folder(self, unfinished: Path) -> None:
        """Make `unfinished`, from the folder of the version before the latest if its file can be overwritten. Remove
        all other folders except the latest."""
        for folder in self.folder.iterdir():
            if folder.is_dir() and folder != self._latest:
                if not unfinished.exists():
                    self._rename(folder, unfinished)  # no reader finds it from here on
                    file = self._files.get(unfinished)
                    if file is not None and file.is_unused():
                        continue
                    folder = unfinished
                self._close_file(folder)
                shutil.rmtree(folder)
        unfinished.mkdir(exist_ok=True)

    def _rename(self, folder: Path, to: Path) -> None:
        folder.rename(to)
        if folder in self._files:
            self._files[to] = self._files.pop(folder)

    def _close_file(self, folder: Path) -> None:
        file = self._files.pop(folder, None)
        if file is not None:
            file.close()

    def _write(self, folder: Path, weights: Weights) -> dict[str, str]:
        """Write the file in `folder`; return the checksum of each tensor as stored in the file, by name."""
        header, offsets, size = layout(weights.specs(), self.dtype)
        file = self._file(folder, size)
        file.memory[: len(header)] = header

        def write(name: str, tensor: Tensor) -> LineSums | None:
            numbers = torch.frombuffer(file.memory, dtype=self.dtype, count=tensor.numel(), offset=offsets[name])
            if self._checksum:
                return copy_and_sum(numbers.view(tensor.shape), tensor)
            numbers.view(tensor.shape).copy_(tensor)
            return None

        with closing(weights.weights()) as found:
            sums = self._copiers.each(write, found)
        self.sent_bytes += size - len(header)
        if self._on_disk:
            file.memory.flush()
            to_disk(folder / self._file_name)
        return checksums({name: found for name, found in sums.items() if found is not None})

    def _file(self, folder: Path, size: int) -> _MappedFile:
        """Return the file in `folder`, open and mapped, of `size` bytes; raises `PublicationError` if there is no
        room."""
        if folder in self._files and len(self._files[folder].memory) != size:
            self._close_file(folder)
        if folder not in self._files:
            try:
                self._files[folder] = _MappedFile(folder / self._file_name, size, populate=not self._on_disk)
            except OSError as error:
                free = shutil.disk_usage(self.folder).free
                raise PublicationError(
                    f"the weights, {size / 2**20:.0f} MiB, do not fit into {self.folder} ({error.strerror}; "
                    f'{free / 2**20:.0f} MiB are free): make room there, or take weights.mode = "collective"'
                ) from error
        return self._files[folder]


class _MappedFile:
    """A file that stays open and mapped for as long as it may be written to: mapping it again costs as much as a
    copy."""

    def __init__(self, file: Path, size: int, *, populate: bool) -> None:
        """`populate`: allocate all of its memory now. Raises `OSError` if there is no room."""
        flags = os.O_RDWR if file.exists() else os.O_RDWR | os.O_CREAT | os.O_EXCL
        mode = PRIVATE if populate else SHARED
        self._file = os.fdopen(os.open(file, flags | os.O_NOFOLLOW, mode), "r+b")
        try:
            os.truncate(self._file.fileno(), size)
            os.posix_fallocate(self._file.fileno(), 0, size)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self.memory = mmap.mmap(self._file.fileno(), size, flags=flags)
        except OSError:
            self._file.close()
            raise

    def is_unused(self) -> bool:
        """Return whether no other process has the file open or mapped; False where the system cannot determine it."""
        try:
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)  # sent on a concurrent open; ignored by default
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file. The mapping ends with the last tensor in it: abandoned threads may still be copying to it."""
        self._file.close()


def has_room(size: int, root: Path = SHARED_MEMORY) -> bool:
    """Return whether this host has shared memory with `size` free bytes."""
    try:
        return shutil.disk_usage(root).free >= size
    except OSError:
        return False


def folder_in_memory(name: str, *, root: Path) -> Path:
    """Make a folder for weights in shared memory, to be claimed; remove the folders that dead runs of this user
    left."""
    for folder in root.glob(f"{PREFIX}*"):
        _remove_if_abandoned(folder)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=root))


def claim(folder: Path) -> IO[bytes]:
    """Take ownership of `folder`, and empty it; return its lock, which is held as long as it is open. Raises
    `PublicationError` if the folder cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / OWNER).open("ab")
    except OSError as error:
        raise PublicationError(f"{folder} cannot be used for weights ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise PublicationError(f"{folder} cannot be used for weights: is another run writing there?") from error
    except OSError as error:  # a file system without locks, as Lustre often is
        log.warning("%s cannot be locked (%s): let no other run write its weights there", folder, error.strerror)
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
    return lock


def _remove_if_abandoned(folder: Path) -> None:
    """Remove `folder` if a run of this user made it and its process is gone."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return  # not made by a run of this user
        if not (folder / OWNER).exists():
            if time.time() - found.st_mtime > UNOWNED_SECONDS:
                folder.rmdir()
            return
        with (folder / OWNER).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed the weights that a dead run left in %s", folder)
    except OSError:  # another user's folder, in use, or not empty without an owner
        log.debug("%s belongs to a run that lives, or to somebody else", folder)


SETS = 2


class WeightMemory:
    """Weights for gservers on the same GPU: two alternating sets, in memory that is shared by CUDA IPC.

    A gserver copies a set when it stages it. Invariant: the set of the served version is not written to; the set of the
    version before it is.
    """

    reads_once = True

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        checksum: bool,
        gpu: str = "",
        share: Share = cuda_memory.share,
        root: Path = SHARED_MEMORY,
    ) -> None:
        """`gpu`: identity of `device`, as in `Register`. `share` makes the handle of memory on it. The files that
        announce the memory to gservers are below `root`."""
        self.dtype = dtype
        self.sent_bytes = 0
        self._device = device
        self._gpu = gpu
        self._checksum = checksum
        self._share = share
        self._folder = folder_in_memory("cuda", root=root)
        self._lock = claim(self._folder)
        self._sets: list[tuple[SharedWeights, dict[str, Tensor]]] = []
        """Two: the announced content, and the weights by name. They are made once, because torch keeps an entry and an
        event for every handle that it makes."""
        self._beside = SideStream(device)
        self._version = 0
        self._sums: dict[str, str] = {}

    def prepare(self, version: int, weights: Weights) -> None:
        """Copy `weights` to the next set in turn."""
        if version == self._version:
            return
        if not self._sets:
            places, size = cuda_memory.lay_out(dict(weights.specs()), self.dtype)
            self._sets = [self._new_set(places, size) for _ in range(SETS)]
        content, targets = self._sets[version % SETS]
        sums: dict[str, LineSums] = {}
        with self._beside.after_computation(), closing(weights.weights()) as found:
            for name, weight in found:
                if self._checksum:
                    sums[name] = copy_and_sum(targets[name], weight.detach())
                else:
                    targets[name].copy_(weight.detach())
                self.sent_bytes += targets[name].nbytes
            self._sums = checksums(sums)
        folder = self._folder_of(version)
        folder.mkdir(exist_ok=True)
        cuda_memory.write(folder, content)
        self._version = version

    def announce(self) -> Snapshot:
        return Snapshot(folder=str(self._folder_of(self._version)), machine=machine_identity(), gpu=self._gpu)

    def send(self, begin: PublishBeginReply) -> dict[str, str]:
        """Return the checksums; the weights are complete already."""
        return self._sums

    def abort(self) -> None:
        """Do nothing: a failed attempt leaves the set valid."""

    def close(self) -> None:
        """Free the memory."""
        self._sets.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _new_set(self, places: dict[str, WeightPlace], size: int) -> tuple[SharedWeights, dict[str, Tensor]]:
        """Allocate a set of `size` bytes."""
        storage = torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()
        content = SharedWeights(self._share(storage), places)
        return content, dict(content.views(storage))

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"v{version % SETS}"
