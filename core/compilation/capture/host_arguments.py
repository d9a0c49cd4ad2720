"""Read the host-side arguments of a graph that are values of declared inputs, where these lie in host memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.inputs import InputSpec
from core.errors import UsageError

HostStep = dict[str, list[int]]
"""The values of inputs by name, flat and padded to the bucket's size."""


def step_of_mirror(
    key: GraphKey, names: Collection[str], mirror: Mapping[str, Tensor], elsewhere: Collection[str]
) -> HostStep | None:
    """Return the values of the arguments from inputs that were prepared on the host.

    Return None if an argument is no input, since its values are unknown then. Raises `UsageError` if an argument is in
    `elsewhere`.

    - names: the arguments.
    - mirror: the bucket's inputs, on the host.
    - elsewhere: inputs that do not come from the mirror in this step.
    """
    if not mirror.keys() >= set(names):
        return None
    unknown = sorted(set(names) & set(elsewhere))
    if unknown:
        raise UsageError(
            f"replaying {key} from host memory with {', '.join(unknown)} from elsewhere",
            found="the graph also needs their values on the host, and the host does not know them in this step",
            remedy="write them into the mirror, or give them: replay(key, step={name: values})",
        )
    return {name: mirror[name].reshape(-1).tolist() for name in names}


def step_of_call(
    key: GraphKey,
    names: Collection[str],
    inputs: Mapping[str, Tensor],
    *,
    specs: Mapping[str, InputSpec],
    sizes: Mapping[str, int],
) -> HostStep | None:
    """Return the values of the arguments from a call's inputs, padded to the bucket; None if an argument is no input.

    Raises `UsageError` where the values are not on the host: reading them back would make every call wait for the
    device.

    - names: the arguments.
    - sizes: the bucket's size of each dimension.
    """
    if not specs.keys() >= set(names):
        return None
    step = {}
    for name in names:
        spec, tensor = specs[name], inputs.get(name)
        if tensor is None or not _is_on_host(tensor) or spec.padding in ("keep", "bound"):
            where = "is not given" if tensor is None else f"is on {tensor.device}, with padding {spec.padding!r}"
            raise UsageError(
                f"running {key} with the values of {name!r} from the host",
                found=f"the input {where}",
                remedy=f"pass {name} on the host, or its values at the bucket's size: step={{{name!r}: [...]}}",
            )
        step[name] = spec.padded(tensor, sizes).reshape(-1).tolist()
    return step


def _is_on_host(tensor: Tensor) -> bool:
    try:
        tensor.detach().numpy()  # shares memory where the host can read it, and copies nothing
    except (TypeError, RuntimeError):
        return False
    return True
