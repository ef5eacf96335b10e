"""A `streamrl` command that starts others, with stand-in components."""

import sys
from functools import partial

from streamrl import cli
from streamrl.launch import local, pool, trainer
from tests.launch.standins import COMPONENTS

local.run_locally = partial(local.run_locally, components=COMPONENTS)
trainer.run_trainer = partial(trainer.run_trainer, components=COMPONENTS)
pool.Pool = partial(pool.Pool, components=COMPONENTS)  # type: ignore[assignment, misc]
sys.argv = ["streamrl", *sys.argv[1:]]
cli.main()
