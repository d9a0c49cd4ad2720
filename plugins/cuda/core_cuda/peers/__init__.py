"""Other ways to run a model on a GPU, which `core bench` measures beside `core`."""

from __future__ import annotations

from core.common.peers import Peer

PEERS = (
    Peer(
        name="vllm",
        runner="core_cuda.peers.vllm:engine",
        requires=("vllm", "torch", "transformers"),
        install="pip install vllm, and name its Python by --peer-python vllm=PATH where it is another environment",
        dtypes=("bfloat16", "float16"),
        draws_weights=True,
        lasting=True,
    ),
)
