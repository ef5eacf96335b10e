"""C files that are compiled for the processor at hand when they are first wanted.

A library is kept in streamrl's cache (`models.cache_home`), under a name that says of what it was made, and several
processes that want it at once make it once. Whoever wants one has to do without where there is no compiler (`$CC`, or
`cc`), and should try whether what it makes is right; `CC=false` asks to do without.
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

from streamrl.models import cache_home, making

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
"""None that would let the compiler take sums of floating-point numbers apart."""
COMPILE_SECONDS = 120.0


class Unavailable(Exception):
    """Why a library cannot be had."""


def compiled(sources: Sequence[Path], *, headers: Sequence[Path] = (), options: Sequence[str] = ()) -> Path:
    """The shared library of `sources`, named after the first; `options` are the compiler's, besides `FLAGS`.

    Raises `Unavailable`.
    """
    if sys.platform != "linux":
        raise Unavailable(f"C is compiled on Linux only, and this is {sys.platform}")
    compiler = shlex.split(os.environ.get("CC", "").strip() or "cc")
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"there is no C compiler ({compiler[0]}); install one, or name it in CC")
    command = [*compiler, *FLAGS, "-fPIC", "-shared", *map(str, sources), *options]
    made_of = (
        [file.read_text() for file in (*headers, *sources)],
        command,
        _told(*compiler, "--version"),
        _processor(),
    )
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    library = cache_home() / f"{sources[0].stem}-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with making(library), tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{library.stem}-") as folder:
        if not library.exists():
            log.info("compiling %s for this processor (once, some seconds)", ", ".join(file.name for file in sources))
            made = Path(folder, library.name)
            _told(*command, "-o", str(made))
            made.rename(library)
    return library


def _processor() -> str:
    """What -march=native looks at."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if re.match(r"model name|flags|Features|CPU part", line))


def _told(*command: str) -> str:
    """What a command has printed; raises `Unavailable` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} has failed: {done.stderr.strip()[-500:]}")
    return done.stdout
