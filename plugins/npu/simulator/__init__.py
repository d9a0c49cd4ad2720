"""A simulated ACL runtime: the shared libraries that torch_npu needs, computing on this machine's processor.

build.py makes the libraries from csrc/ and from what the installed torch_npu asks for, launch.py runs a command under
them, runtime.py reads what happened and injects failures, marshal.py and kernels/ compute. It proves control flow,
arguments and numbers of reference arithmetic; it proves nothing about an NPU's speed, limits or rounding.
"""
