"""Tracing: a module or function and its example inputs in, one `fx.GraphModule` with bound slots out.

Dynamo traces once, `fullgraph`. Its guards are answered here and now: weights, buffers and closures become constants of
the trace, declared inputs stay inputs, and conditions on symbolic sizes are kept, so that each bucket can be checked
against them (`TracedGraph.holds_for`).
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental import _config

from core.compilation.trace.dynamo_backend import Capture
from core.compilation.trace.state import Snapshot, model_tensors
from core.compilation.trace.subclasses import refused_class
from core.compilation.trace.traced import TracedGraph
from core.errors import TraceError


def trace(
    model: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    *,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    writable: Collection[str] = (),
    least: Literal[1, 2] = 2,
) -> TracedGraph:
    """Trace `model(**inputs, **constants)` as one graph, running nothing of it.

    dynamic: per input, the dimensions to keep symbolic where the model allows. constants: further arguments, fixed by
    the trace. writable: inputs that the model may write into, since their memory is the caller's own. least: 1 asks for
    a trace that also serves sizes of 1, where the model does the same there, which becomes a condition like others (but
    for what it decides by the strides of a copy, of which torch tells nothing); the inputs themselves must be larger
    for that. Raises `TraceError` with Dynamo's reason and the user code's place if
    the model breaks the graph or returns something that is not a tree of tensors.
    """
    start = time.perf_counter()
    capture = Capture(inputs, writable)
    for name, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(inputs[name], dim)
            if inputs[name].shape[dim] < 2:
                least = 2  # it is fixed at this size
    step = _fresh_step(model, dict(constants or {}))
    state = Snapshot(model)
    # Without duck shaping each dimension gets a symbol of its own; sizes that are equal by chance stay independent.
    from_one = least == 1 and hasattr(_config, _FROM_ONE)
    shapes = {"use_duck_shape": False, **({_FROM_ONE: True} if from_one else {})}
    with torch.no_grad(), _SHAPES.patch(**shapes), _settings():
        try:
            result = torch.compile(step, backend=capture.backend, fullgraph=True)(**inputs)
        except Exception as error:
            # What our own backend raises arrives wrapped by Dynamo.
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, TraceError):
                inner = refused_class(model_tensors(model), str(error)) or _trace_error(model, error)
            raise inner from error
        else:
            names = {id(tensor): path for path, tensor in model_tensors(model)}
            return capture.finish(_name(model), result, state.changes(), start, names)
        finally:
            state.restore()
            _forget(step, capture)


def _forget(step: Callable[..., Any], capture: Capture) -> None:
    """Take from Dynamo what it keeps for good: the compiled code of `step`, and the backend with all it captured."""
    torch._C._dynamo.eval_frame.reset_code(step.__code__)
    vars(capture).clear()


_SHAPES: Any = _config  # torch installs `patch` on its config modules at run time
_FROM_ONE = "backed_size_oblivious"
"""Torch's setting under which a size may turn out to be 1, and code that asks leaves a guard.

Without it sizes are taken to be 2 and more, and such code leaves no trace of having asked."""
_DYNAMO = {"automatic_dynamic_shapes": False, "assume_static_by_default": True, "suppress_errors": False}
_WASTE = {"guard_nn_modules": False, "run_gc_after_compile": False}
"""What costs time for nothing here: no guard is ever asked, and captures begin with a collection."""


def _settings() -> Any:
    """Return the settings of a trace, to be entered; those that not every torch has where it has them."""
    config: Any = torch._dynamo.config
    return config.patch(_DYNAMO | {name: value for name, value in _WASTE.items() if hasattr(config, name)})


def _fresh_step(model: Callable[..., Any], constants: dict[str, Any]) -> Callable[..., Any]:
    """Return `model(**kwargs, **constants)` as a function with a code object of its own.

    Dynamo keeps compiled code and its recompile count per code object: shared ones would reach the limit after a few
    programs and keep every traced model alive.
    """

    def step(**inputs: Any) -> Any:
        return model(**inputs, **constants)

    fresh = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    return fresh


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", repr(model))


def _trace_error(model: Callable[..., Any], error: Exception) -> TraceError:
    text = str(error).split("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip() or type(error).__name__
    faked = re.search(r"unsupported operator: ([\w.]+)\.\w+", text)
    if faked is not None:
        _, called, place = text.partition("from user code:")
        op = faked[1].replace(".", "::", 1)
        where = f", called here:{place}" if called else ""
        return TraceError(
            f"tracing {_name(model)} as one graph",
            found=f"the op {op} has no fake kernel, which tracing runs in its place{where}",
            remedy=f"declare one (docs/fakes.md; torch.library.register_fake({op!r}, …) for one process), or run this "
            "phase with mode 'off' (eager)",
        )
    return TraceError(
        f"tracing {_name(model)} as one graph",
        found=f"{type(error).__name__}: {text}",
        remedy="mend the place named above, or run this phase with mode 'off' (eager)",
    )
