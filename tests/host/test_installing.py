"""core/host/distributions/installing.py: an extra is installed from where core came from."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import pytest

from core.host.distributions.installing import pip_install

ANYWHERE = "pip install 'core[hf,serve]'"


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ('{"dir_info": {"editable": true}, "url": "file:///src/my%20core"}', "pip install -e '/src/my core[hf,serve]'"),
        ('{"dir_info": {}, "url": "file:///src/core"}', "pip install '/src/core[hf,serve]'"),
        ('{"archive_info": {}, "url": "file:///tmp/core-1.0-py3-none-any.whl"}', ANYWHERE),
        ('{"vcs_info": {}, "url": "https://example.com/core.git"}', ANYWHERE),
        (None, ANYWHERE),
        ("{", ANYWHERE),
        ("[]", ANYWHERE),
    ],
)
def test_the_command_names_where_core_came_from(
    record: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    assert pip_install("hf", "serve") == command


def test_without_metadata_it_is_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert pip_install("conformance") == "pip install 'core[conformance]'"
