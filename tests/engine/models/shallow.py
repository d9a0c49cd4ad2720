"""The embedded model cut to its first layer, whose graphs are traced in a third of the time."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

from core.engine.models.assets import embedded_model


@cache
def shallow_model() -> Path:
    """Return its folder, made once for a process; read only.

    Its text is poor, and its tokenizer, widths, and everything that differs from one request to the next are those of
    the whole model: for tests of what an engine does with a request. Layers alike add nothing to these but time.
    """
    folder = Path(tempfile.mkdtemp(prefix="core-shallow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(embedded_model(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: v for name, v in weights.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
