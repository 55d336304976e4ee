"""Notebooks as JupyterLab saves them: with outputs cleared, the same bytes on every machine."""

from typing import Any


def forget_version(model: dict[str, Any], **_: Any) -> None:
    """A hook that JupyterLab calls before it saves: which Python ran a notebook is not part of it, but of its runs."""
    if model["type"] == "notebook":
        model["content"]["metadata"].get("language_info", {}).pop("version", None)
