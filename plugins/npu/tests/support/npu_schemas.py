"""The snapshot of torch_npu's schemas for which the plugin declares fakes."""

from __future__ import annotations

from pathlib import Path

SNAPSHOT = Path(__file__).parents[1] / "data" / "npu_schemas.txt"
SCHEMAS = [line for line in SNAPSHOT.read_text().splitlines() if not line.startswith("#")]
