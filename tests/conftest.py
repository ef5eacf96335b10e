"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("unhurried")
