"""A gserver's process that a test kills."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from streamrl.gserver.server.process import running
from tests.gserver.serving import config_of


async def main(folder: Path) -> None:
    config = config_of(engine="sglang", limits={"start_seconds": 60.0})
    async with running(config, index=0, model_dir=folder) as (_, url):
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
