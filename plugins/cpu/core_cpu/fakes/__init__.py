"""Packs of fake kernels for op libraries of the processor that bring none: one module a library."""

from core_cpu.fakes.sgl_kernel import SGL_KERNEL as SGL_KERNEL
from core_cpu.fakes.torch_ipex import TORCH_IPEX as TORCH_IPEX
