"""User code for `tests/test_userland.py`, good and hostile; the payload of a call selects the behaviour."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.userland import UserFunction


def act(words: list[str]) -> Any:
    """Do what `words` state, and return 1 unless they state otherwise."""
    match words:
        case ["pid"]:
            return os.getpid()
        case ["raise"]:
            raise LookupError("no such thing")
        case ["exit", status]:
            os._exit(int(status))
        case ["spin"]:
            while True:
                pass
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["ignore SIGTERM"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case ["fork"]:
            return os.fork() and 1  # the copy returns, too
        case ["nothing"]:
            return 0
        case ["write"]:
            print("\x01\x02" * 3000, flush=True)  # noqa: T201
            os.write(1, b"straight to the descriptor")
            return 1 + len(sys.stdin.read())
        case ["close"]:
            os.closerange(0, 64)
        case ["allocate"]:
            return len(bytearray(1 << 40))
        case ["spawn", path]:
            Path(path).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)
        case ["environment"]:
            return sorted(os.environ)
    return 1


async def act_later(words: list[str]) -> Any:
    """As `act`, as a coroutine; `wait SECONDS` lets others run."""
    if words[0] == "wait":
        await asyncio.sleep(float(words[1]))
        return 1
    return act(words)


def serve(function: str) -> UserFunction:
    """Return one of the functions above (`userland.Setup.loader`)."""
    functions: dict[str, Callable[..., Any]] = {"act": act, "act_later": act_later}
    return UserFunction(functions[function], arguments=msgspec.msgpack.Decoder(tuple[list[str]]).decode, result=checked)


def checked(value: Any) -> Any:
    if value == 0:
        raise ValueError("it returned 0")
    return value


def fail(**settings: Any) -> UserFunction:
    """A loader that ends its process."""
    os._exit(4)
