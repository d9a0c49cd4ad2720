"""How to install an extra of core: from where this core was installed, which an index need not have."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "core"


def pip_install(*extras: str) -> str:
    """Return the command that installs core with these extras: from the folder it was installed from, else by name.

    pip notes the folder in the file `direct_url.json` of an installation (PyPA's "Recording the Direct URL Origin").
    """
    record = _origin()
    where = urlsplit(record.get("url", ""))
    wanted = f"[{','.join(extras)}]"
    if "dir_info" not in record or where.scheme != "file":
        return f"pip install '{_NAME}{wanted}'"
    editable = "-e " if record["dir_info"].get("editable") else ""
    return f"pip install {editable}'{url2pathname(where.path)}{wanted}'"


def _origin() -> dict[str, Any]:
    try:
        text = metadata.distribution(_NAME).read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
