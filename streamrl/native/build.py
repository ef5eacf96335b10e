"""Compiles C for the processor at hand, the first time that a library is needed.

Libraries are kept in streamrl's cache (`disk.py`) under a name that hashes what they were made from: sources,
command, compiler version and processor. Processes that need the same library at once compile it once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from streamrl.disk import cache_home, making, to_disk

log = logging.getLogger(__name__)

SWITCH = "STREAMRL_NATIVE"
"""Environment variable: `0` turns all C off."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
"""None of these lets the compiler reorder sums of floating-point numbers."""
COMPILE_SECONDS = 60.0
"""A compiler that takes longer is stopped; compiling takes some seconds, if nobody else wants the processor."""


class Unavailable(Exception):
    """Why a library cannot be had."""


class TookTooLong(Unavailable):
    """The compiler did not end in time: on a machine that is less busy it may."""


def shared_library(sources: Sequence[Path], *, headers: Sequence[Path] = (), options: Sequence[str] = ()) -> Path:
    """Return the shared library compiled from `sources`, which is named after the first of them.

    `headers` are the files that the sources include, `options` the compiler's besides `FLAGS`. The compiler is `$CC`,
    or `cc`. Raises `Unavailable` where there is none, where it fails, and where `STREAMRL_NATIVE=0`. What has failed is
    not tried again by the next process (the reason is kept beside the library's place), unless it took too long.
    """
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{SWITCH}=0")
    if sys.platform != "linux":
        raise Unavailable(f"C is compiled on Linux only, and this is {sys.platform}")
    compiler = shlex.split(os.environ.get("CC", "").strip() or "cc")
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"there is no C compiler ({compiler[0]}); install one, or name it in CC")
    command = [*compiler, *FLAGS, "-fPIC", "-shared", *map(str, sources), *options]
    made_from = (
        [file.read_text() for file in (*headers, *sources)],
        command,
        _output_of(*compiler, "--version"),
        _processor(),
    )
    digest = hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]
    library = cache_home() / f"{sources[0].stem}-{digest}.so"
    failure = library.with_suffix(".failed")
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with making(library), tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{library.stem}-") as folder:
        if failure.exists():
            raise Unavailable(f"{failure.read_text()} (remove {failure} to try again)")
        if not library.exists():
            log.info("compiling %s for this processor (once, some seconds)", ", ".join(file.name for file in sources))
            made = Path(folder, library.name)
            try:
                _output_of(*command, "-o", str(made))
            except TookTooLong:
                raise
            except Unavailable as reason:
                failure.write_text(str(reason))
                raise
            to_disk(made)
            made.rename(library)
    return library


def has_instructions(name: str) -> bool:
    """Return whether this processor has the instructions that Linux calls `name`, for example `avx512f`."""
    return bool(re.search(rf"^flags\s*:.*\b{re.escape(name)}\b", _processor(), re.MULTILINE))


def _processor() -> str:
    """Return what decides the effect of -march=native."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if re.match(r"model name|flags|Features|CPU part", line))


def _output_of(*command: str) -> str:
    """Run a command and return what it printed; raises `Unavailable` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise TookTooLong(f"{command[0]} did not end within {COMPILE_SECONDS:g} s; is this machine busy?") from error
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} has failed: {done.stderr.strip()[-500:]}")
    return done.stdout
