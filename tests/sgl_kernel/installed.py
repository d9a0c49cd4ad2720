"""The reference library, loaded as the real one is: its ops are registered on import, and bring no fakes."""

from __future__ import annotations

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.sgl_kernel import reference

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=reference.RANKS)
LIBRARY = torch.library.Library(reference.NAMESPACE, "DEF")
reference.define(LIBRARY)
