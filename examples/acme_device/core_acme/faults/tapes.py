"""What faults of graphs do to a finished tape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from core.common.graphs.recorder import written_by
from core.common.graphs.tape import Call, Tape, identify
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_RACE_S = 0.002  # how long a replay leaves its result in the shared buffer while there are other threads
_WORKSPACES: dict[int, torch.UntypedStorage] = {}


def copy_arguments(tape: Tape, tensors: Iterable[Tensor]) -> None:
    """Let all calls read copies, made now, of the memory of these tensors, unless the tape writes into it."""
    written = {identify(tensor) for call in tape.calls for tensor in written_by(call.op, tuple(call.args), call.kwargs)}
    copies = {
        identify(tensor): tensor.untyped_storage().clone() for tensor in tensors if identify(tensor) not in written
    }

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or identify(leaf) not in copies:
            return leaf
        empty = torch.empty(0, dtype=leaf.dtype)
        return empty.set_(copies[identify(leaf)], leaf.storage_offset(), leaf.shape, leaf.stride())

    for call in tape.calls:
        # In place: host-side arguments are renewed in these containers.
        call.args[:] = tree_map(copied, call.args)
        call.kwargs.update(tree_map(copied, call.kwargs))


def constants(tape: Tape, inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the floating-point tensors that the calls read and neither allocate nor are given as inputs."""
    given = {identify(tensor) for tensor in inputs} | tape.fresh.keys()
    leaves = [leaf for call in tape.calls for leaf in tree_leaves((call.args, call.kwargs))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [tensor for tensor in tensors if identify(tensor) not in given]


def reuse_memory(tape: Tape, outputs: Iterable[Tensor]) -> None:
    """Give the memory of the first output that is not made last to the last result of the tape too."""
    last = last_landing(tape)
    made = [output for output in outputs if identify(output) in tape.fresh]
    early = [output.untyped_storage() for output in made if last is not None and identify(output) != last._cdata]
    if not early or last is None:
        return
    num_bytes = min(early[0].nbytes(), last.nbytes())
    target, source = (torch.empty(0, dtype=torch.uint8).set_(storage)[:num_bytes] for storage in (early[0], last))
    tape.calls.append(Call(torch.ops.aten.copy_.default, [target, source], {}, ()))


def repeat_writes(tape: Tape) -> None:
    """Launch kernels that write memory from before the recording again, as a retry would."""
    calls = []
    for call in tape.calls:
        written = written_by(call.op, tuple(call.args), call.kwargs)
        calls += [call] * (2 if any(identify(tensor) not in tape.fresh for tensor in written) else 1)
    tape.calls[:] = calls


def share_workspace(tape: Tape) -> None:
    """Have one workspace for all streams: the last call leaves its result there before it lands."""
    index = max((i for i, call in enumerate(tape.calls) if call.landings), default=None)
    if index is not None:
        call = tape.calls[index]
        tape.calls[index] = call._replace(op=_through_workspace(call.op, call.landings[0].place))


def _through_workspace(op: Callable[..., Any], place: int) -> Callable[..., Any]:
    def staged(*args: Any, **kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        storage = tree_leaves(results)[place].untyped_storage()
        num_bytes = storage.nbytes()
        workspace = _WORKSPACES.setdefault(num_bytes, torch.UntypedStorage(num_bytes))
        workspace.copy_(storage)
        if threading.active_count() > 1:
            time.sleep(_RACE_S)
        storage.copy_(workspace)
        return results

    return staged


def last_landing(tape: Tape) -> torch.UntypedStorage | None:
    """Return the memory into which the last result of a replay lands, None where all are written in place."""
    landings = [landing for call in tape.calls for landing in call.landings]
    return landings[-1].storage if landings else None
