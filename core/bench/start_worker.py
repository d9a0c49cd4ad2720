"""The worker that `core.bench.start` times: all up to one token, then each phase's seconds and the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.device import Device


def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Load, compile, serve one token; return the seconds of the `phases` by name, those of compilers beside the
    first step (`background_s`), how many `kernels` were `compiled`, and which part `ahead` of the first run, and what
    the compile `cache` did.

    arguments: `started` (time.time() before the process was started), `device`, `model`, `preset`, `dtype`, `quantize`
    and `calibration` (or neither), `prompt` (its length) and `options` (as of `engine_options`).
    """
    from core.common.collector import importing, own_process

    own_process(own=True)  # as `core run` and `core serve` start
    with importing():
        from core.bench.model import asked_quantize, config_of, open_model
        from core.engine.config import SamplingParams
        from core.engine.models.hf import import_transformers
        from core.engine.serve.engine import Engine
        from core.host.selection import select_device

        # Import here what transformers imports lazily, so that it does not count as making weights.
        _ = import_transformers().PreTrainedModel
    marks = [("imports", time.time())]
    device = select_device(arguments["device"])
    keep_all_kernels(device)
    device.parts.prepare()
    marks.append(("device", time.time()))
    loaded, _ = open_model(
        arguments["model"], arguments["preset"], device, arguments["dtype"], asked_quantize(arguments)
    )
    device.synchronize()
    marks.append(("weights", time.time()))
    length = int(arguments["prompt"])
    config = replace(
        config_of(arguments["options"]),
        max_num_seqs=1,
        max_model_len=min(length + 16, loaded.max_position or length + 16),
        decode_buckets=(1,),
        prefill_buckets=(length,),
        sampling=("greedy",),
    )
    config = replace(config, options=replace(config.options, background=True))
    with Engine(loaded, device, config) as engine:
        marks.append(("engine", time.time()))
        prompt = [3 + index % (loaded.vocab_size - 3) for index in range(length)]
        engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
        marks.append(("first token", time.time()))
        engine.wait_compiled()
        report = engine.report()
    times, before = {}, float(arguments["started"])
    for name, at in marks:
        times[name], before = at - before, at
    itemised = {
        "trace": sum(trace.trace_s for trace in report.traces),
        "passes": sum(trace.passes_s + trace.aten_s for trace in report.traces),
        "kernels": sum(trace.choose_s for trace in report.traces) + report.ahead_s,
        "lower": sum(bucket.lower_s for bucket in report.buckets),
        "capture": report.capture_s,
    }
    # Before it compiles, the engine inspects the model, allocates the cache and compares both with the model's forward.
    checks = max(times.pop("engine") - report.total_s, 0.0)
    rest = max(report.total_s - sum(itemised.values()), 0.0)
    first = times.pop("first token")
    phases = {**times, "checks": checks, **itemised, "rest of compile": rest, "first token": first}
    return {
        "phases": phases,
        "background_s": report.background_s,
        "kernels": {"compiled": report.num_kernels, "ahead": report.num_ahead},
        "cache": f"{report.cache.state}: {report.cache.reason}".removesuffix(": "),
    }


def keep_all_kernels(device: Device) -> None:
    """Have every compiler of kernels keep to the folder of this start's cache, whatever the environment says."""
    from core.compilation.cache.store import Store

    for compiler in device.kernel_compilers:
        os.environ.pop(compiler.folder_variable, None)
    Store.of_user().keep_kernels(device.kernel_compilers)
