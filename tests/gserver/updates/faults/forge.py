"""Makes gserver processes cheaply: loads everything once, then forks one for each line on stdin.

A line is a JSON object with the `config` file, the `folder` of the model and the `index`; the answer is one with
the `pid` and `url` of the new gserver. They end with this process.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from streamrl import config as configuration
from streamrl.gserver.server.process import running

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent ends."""


async def serve(config: str, folder: str, index: int) -> None:
    async with running(configuration.load(config), index=index, model_dir=Path(folder)) as (_, url):
        sys.stdout.write(json.dumps({"pid": os.getpid(), "url": url}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asyncio.run(serve(**json.loads(line)))
            os._exit(0)


if __name__ == "__main__":
    main()
