"""Trace a module or a function with example inputs as one `fx.GraphModule`, and say what each placeholder receives.

Dynamo traces once, `fullgraph`. Its guards are settled at once. Weights, buffers and closures become constants of the
trace; declared inputs stay inputs. Conditions on symbolic sizes are kept: each bucket is checked against them
(`TracedGraph.why_not_for`).
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental import _config

from core.compilation.trace import side_effects
from core.compilation.trace.counters import Counted
from core.compilation.trace.dynamo_backend import Capture
from core.compilation.trace.model_tensors import model_tensors
from core.compilation.trace.reads import recording
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
    counted: Counted | None = None,
) -> TracedGraph:
    """Trace `model(**inputs, **constants)` as one graph, running nothing of it.

    Raises `TraceError` with Dynamo's reason and the user code's place if the model breaks the graph, changes Python
    state or returns something that is not a tree of tensors. Python objects that the model changes are put back.

    - dynamic: per input, the dimensions to keep symbolic where the model allows.
    - constants: further arguments, fixed by the trace.
    - writable: inputs that the model may write into, since their memory is the caller's own.
    - least: the smallest size to serve. With 1, the trace also serves sizes of 1 if the model does the same work there;
      that becomes a condition like others. What the model decides by the strides of a copy is no such condition: torch
      does not report it. Dynamic dimensions of the inputs themselves must be larger than 1.
    - counted: None refuses a model that changes Python state. A mapping allows it to change integer attributes: those
      in the mapping, and those that the trace finds, become `TracedGraph.counters`.
    """
    start = time.perf_counter()
    counted = counted if side_effects.LEAVES_STATE else None
    capture = Capture(model, inputs, writable, counted or {})
    for name, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(inputs[name], dim)
            if inputs[name].shape[dim] < 2:
                least = 2  # torch fixes a dimension of size 1
    step = _fresh_step(model, dict(constants or {}))
    # Without duck shaping each dimension gets a symbol of its own; sizes that are equal by chance stay independent.
    from_one = least == 1 and hasattr(_config, _FROM_ONE) and side_effects.LEAVES_STATE
    shapes = {"use_duck_shape": False, **({_FROM_ONE: True} if from_one else {})}
    symbols = side_effects.counter_settings(counted) if counted else nullcontext()
    with torch.no_grad(), _SHAPES.patch(**shapes), _settings(), symbols, recording() as reads:
        try:
            result = torch.compile(step, backend=reads.taking_guards(capture.backend), fullgraph=True)(**inputs)
        except Exception as error:
            # Dynamo wraps exceptions of our own backend.
            inner = getattr(error, "inner_exception", error)
            if not isinstance(inner, TraceError):
                inner = refused_class(model_tensors(model), str(error)) or _trace_error(model, error)
            countable = {} if counted is None else {**counted, **capture.countable}
            if len(countable) == len(counted or {}):
                raise inner from error
            refusal: TraceError = inner
        else:
            names = {id(tensor): path for path, tensor in model_tensors(model)}
            reads.settle(step.__globals__)
            return replace(capture.finish(_name(model), result, start, names), reads=reads)
        finally:
            _forget(step, capture)
    options: Any = {"dynamic": dynamic, "constants": constants, "writable": writable, "least": least}
    try:
        return trace(model, inputs, counted=countable, **options)
    except TraceError as error:  # the caller declared a number, so an error about symbols would not help
        raise error if error.keeps_state else refusal from None


def _forget(step: Callable[..., Any], capture: Capture) -> None:
    """Remove what Dynamo would keep for ever: the compiled code of `step`, and the backend with everything it
    captured."""
    torch._C._dynamo.eval_frame.reset_code(step.__code__)
    vars(capture).clear()


_SHAPES: Any = _config  # torch installs `patch` on its config modules at run time
_FROM_ONE = "backed_size_oblivious"
"""Torch's setting that lets a symbolic size be 1: code that asks whether a size is 1 then leaves a guard.

Without the setting torch takes every symbolic size for 2 or more, and such code leaves no guard. Torch 2.8 has the
setting, and leaves no guard either: there, as with any torch that would change Python's state, it stays off."""
_DYNAMO = {"automatic_dynamic_shapes": False, "assume_static_by_default": True, "suppress_errors": False}
_WASTE = {"guard_nn_modules": False, "run_gc_after_compile": False}
"""Settings that avoid useless work: guards are never evaluated, and each capture begins with a collection."""


def _settings() -> Any:
    """Return a context manager with the settings of a trace, except for those that this torch does not have."""
    config: Any = torch._dynamo.config
    wanted = {**side_effects.SETTINGS, **_WASTE}
    return config.patch(_DYNAMO | {name: value for name, value in wanted.items() if hasattr(config, name)})


def _fresh_step(model: Callable[..., Any], constants: dict[str, Any]) -> Callable[..., Any]:
    """Return `model(**kwargs, **constants)` as a function with a code object of its own.

    Dynamo keeps compiled code and its recompile count per code object. With a shared code object, the count would reach
    its limit after a few programs, and every traced model would stay alive.
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
