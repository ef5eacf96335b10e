"""`streamrl run` or `streamrl trainer` with stand-in components, as the first argument says."""

import sys
from functools import partial

from streamrl import cli
from streamrl.launch import local, trainer
from tests.launch.standins import COMPONENTS

local.run_locally = partial(local.run_locally, components=COMPONENTS)
trainer.run_trainer = partial(trainer.run_trainer, components=COMPONENTS)
sys.argv = ["streamrl", *sys.argv[1:]]
cli.main()
