"""What a shell completes the values of options to; imports neither torch nor a plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def device_names(incomplete: str) -> list[str]:
    """Return `auto` and the devices of the installed plugins that begin as given."""
    from core.host.discovery import discover
    from core.host.plugin_metadata import AUTO
    from core.settings import Settings

    names = {entry.info.device for entry in discover(Settings.from_environment()).entries}
    return [name for name in (AUTO, *sorted(names)) if name.startswith(incomplete)]


def one_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the completion of an option that takes one of these."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete
