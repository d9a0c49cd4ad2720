"""When this process started to load `core`, before any plugin: the cache distrusts source changed later."""

from __future__ import annotations

import time

LOAD_TIME = time.time()
