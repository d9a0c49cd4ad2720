"""The worker that imports torch with its extensions and asks it for its accelerator; a crash stays in its process."""

from __future__ import annotations


def answer(request: dict[str, object]) -> dict[str, object]:
    """Return the type of accelerator that torch drives, "" for none, and how many devices it finds."""
    try:
        from core.accelerator.asked import count_devices, offered_type

        name = offered_type()
        return {"accelerator": name, "count": count_devices() if name else 0, "problem": ""}
    except Exception as error:  # an extension that torch loads may raise anything
        return {"accelerator": "", "count": 0, "problem": f"{type(error).__name__}: {error}"}
