"""When this process began to load `core`, before any plugin: source that changed later may not be what runs."""

from __future__ import annotations

import time

BEGAN = time.time()
