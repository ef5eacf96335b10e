"""`streamrl run` with stand-in components: `python -m tests.launch.run_standins CONFIG [OVERRIDE ...]`."""

import sys
from functools import partial

from streamrl import cli
from streamrl.launch import local
from tests.launch.standins import COMPONENTS

local.run_locally = partial(local.run_locally, components=COMPONENTS)
sys.argv = ["streamrl", "run", *sys.argv[1:]]
cli.main()
