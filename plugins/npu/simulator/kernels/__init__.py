"""Reference arithmetic of the kernels, grouped by family; importing this package registers all of them."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
