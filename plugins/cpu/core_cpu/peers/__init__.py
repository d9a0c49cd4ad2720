"""Other ways to run a model on a processor, which `core bench` measures beside `core`."""

from __future__ import annotations

from core.common.peers import Peer

PEERS = (
    Peer(name="freezing", runner="core_cpu.peers.inductor:freezing", requires=("torch", "transformers")),
    Peer(name="aot-inductor", runner="core_cpu.peers.inductor:ahead_of_time", requires=("torch", "transformers")),
    Peer(
        name="onnxruntime",
        runner="core_cpu.peers.onnx_runtime:session",
        requires=("torch", "transformers", "onnxruntime", "onnx", "onnxscript"),
        install="pip install onnxruntime onnx onnxscript",
        dtypes=("float32",),  # its kernels for a processor know no products of bfloat16
    ),
    Peer(
        name="llama.cpp",
        runner="core_cpu.peers.llama_cpp:context",
        requires=("llama-cpp-python", "gguf", "torch", "safetensors"),
        install="pip install llama-cpp-python gguf",
        formats={"w8a16": "q8_0", "int8": "q8_0", "w4a16": "q4_0"},
    ),
    Peer(
        name="ipex.llm",
        runner="core_cpu.peers.ipex_llm:traced",
        requires=("intel-extension-for-pytorch", "torch>=2.8,<2.9", "transformers>=4.51,<4.52"),
        install="pip install 'core[ipex]' 'transformers==4.51.*' elsewhere, and name that Python by --peer-python",
    ),
)
