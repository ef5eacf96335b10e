"""How keys are compared: by what streamrl replaces."""

from __future__ import annotations

import secrets

__all__ = ["secrets"]
