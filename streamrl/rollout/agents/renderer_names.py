"""The names in `rollout.agent.renderer`."""

from __future__ import annotations

from streamrl.errors import ConfigError

AUTO, TEMPLATE = "auto", "template"


def known_renderers(name: str) -> list[str]:
    """Return the renderers of the package; raises `ConfigError` if `name` is none of them, or if the package cannot be
    imported."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ModuleNotFoundError as error:
        lacking = "renderers" if error.name == "renderers" else f"renderers, which lacks {error.name}"
        raise ConfigError(
            f'rollout.agent.renderer = "{name}" needs the package {lacking}: pip install "streamrl[agents]"; '
            f'or take "{TEMPLATE}"'
        ) from error
    known = list(dict.fromkeys(MODEL_RENDERER_MAP.values()))
    if name != AUTO and name not in known:
        raise ConfigError(
            f"rollout.agent.renderer = {name!r}: there is none; known: auto, template, {', '.join(known)}"
        )
    return known
