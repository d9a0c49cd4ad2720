"""A model in parts, on one of several processes: its graphs come from disk at a second start, each rank's own ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from core.common.ops.collective.collectives import group_size
from tests.common.processes import pretended
from tests.compilation.cache.cached_model import X, assert_miss, assert_warm, cache_of, look, start

pytestmark = pytest.mark.usefixtures("cache_folder")


class Part(nn.Module):
    """Adds up what the processes have, and reads the group that it is one of."""

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = torch.ops.core.all_reduce(F.silu(x), "")
        return whole / group_size("")


def test_a_second_start_of_a_rank_traces_nothing() -> None:
    with pretended(rank=1):
        assert cache_of(start(Part())).state == "miss"
        assert_warm(start(Part()))


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (4, 1)])
def test_another_rank_or_number_of_ranks_has_graphs_of_its_own(size: int, rank: int) -> None:
    with pretended(rank=1):
        start(Part())
    with pretended(size=size, rank=rank):
        assert_miss(look(Part()), f"{rank} of {size}")


class OnMesh(nn.Module):
    """Multiplies by what its mesh says."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mesh.size(0) + self.mesh.get_local_rank("tp")


def test_another_shape_of_a_mesh_is_another_model() -> None:
    with pretended(size=4, rank=1):
        start(OnMesh((2, 2)))
        assert cache_of(start(OnMesh((2, 2)))).state == "hit"
        program = start(OnMesh((4, 1)))
        assert cache_of(program).state == "miss"
        assert torch.equal(program(x=X), X * 4)
