"""`core run`: generate text with a model on a device, and show in the same run what it cost and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.cli.model_argument import (
    ADAPTER,
    BACKGROUND,
    CALIBRATION,
    DETERMINISTIC,
    DEVICE,
    DRAFT_MODEL,
    DTYPE,
    KV_CACHE_DTYPE,
    MEASURE,
    MODEL,
    MODEL_OPTION,
    PROVIDER,
    QUANTIZE,
    SPECULATIVE,
    check_model_options,
    compile_options,
    deterministic_of,
    one_model,
    parse_loras,
)
from core.cli.output import check_file, console, loading, print_core_error, print_items, print_json, status
from core.cli.pass_options import NO_PASS, NO_PASSES, ONLY_PASS, WITH_PASS, pass_switches
from core.cli.ranks import EXPERTS, TP, TP_TIMEOUT, check_experts, run_on_ranks, tried, whole_of, why_not_whole
from core.common.collector import importing
from core.engine.parallel.rank import own_rank
from core.errors import DeviceUnavailableError, ModelError

if TYPE_CHECKING:
    from core.compilation.options import Progress
    from core.device import Device
    from core.engine.check.comparison import Comparison
    from core.engine.models.loading import LoadedModel
    from core.engine.models.quantizing import Quantize
    from core.engine.models.sharding import ExpertCut
    from core.engine.parallel.rank import Rank
    from core.engine.serve.engine import Engine
    from core.engine.serve.request import Completion
    from core.engine.steps.runner import EngineConfig

DEFAULT_PROMPT = "If the argument is"
_LORA = "lora"
"""The name under which the engine has the adapter of `--lora`."""


def run(
    model: str | None = MODEL,
    model_option: str | None = MODEL_OPTION,
    device: str = DEVICE,
    prompt: list[str] = typer.Option([DEFAULT_PROMPT], help="Text to continue; repeat for a batch."),
    max_new_tokens: int = typer.Option(48, help="Tokens to generate per prompt."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_k: int = typer.Option(0, help="Keep the k most likely tokens; 0 keeps all."),
    top_p: float = typer.Option(1.0, help="Keep the most likely tokens up to this probability."),
    seed: int | None = typer.Option(None, help="Seed of the sampling."),
    stop: list[str] = typer.Option([], help="Text that ends the generation; repeatable."),
    dtype: str = DTYPE,
    mode: str | None = typer.Option(
        None, help="Capture mode (full, piecewise, segmented, compile, off), or one per phase: decode=full,prefill=off."
    ),
    quantize: str | None = QUANTIZE,
    calibration: Path | None = CALIBRATION,
    kv_cache_dtype: str = KV_CACHE_DTYPE,
    speculative: int = SPECULATIVE,
    draft_model: Path | None = DRAFT_MODEL,
    lora: Path | None = ADAPTER,
    lowering: str | None = typer.Option(None, help="How graphs become callables, for example inline or inductor."),
    provider: list[str] = PROVIDER,
    measure: bool = MEASURE,
    with_pass: list[str] = WITH_PASS,
    only_pass: list[str] = ONLY_PASS,
    no_pass: list[str] = NO_PASS,
    no_passes: bool = NO_PASSES,
    deterministic: str | None = DETERMINISTIC,
    background: bool = BACKGROUND,
    strict: bool = typer.Option(False, "--strict", help="Fail on a pass that fails or matches less than it owes."),
    verify: str = typer.Option("off", help="Judge every pass against an fp64 run: off, sample or full."),
    check: bool = typer.Option(True, help="Compare speed, tokens and logits with the eager model."),
    cache: bool = typer.Option(True, help="Keep compiled programs on disk and start from there (docs/cache.md)."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write one self-contained HTML page, with a timeline."),
    oracle: bool | None = typer.Option(None, help="Compute the fp64 reference; default: for models small enough."),
    tp: int | None = TP,
    tp_timeout: float = TP_TIMEOUT,
    experts: str = EXPERTS,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead (docs/json.md)."),
) -> int:
    """Generate text with any transformers causal LM on one device, and check it against eager."""
    from core.cli.reports.run import generate, json_of, print_table, write_page
    from core.cli.reports.timeline import RunTimeline
    from core.engine.config import SamplingParams
    from core.engine.steps.runner import EngineConfig
    from core.host.selection import check_name

    model = one_model(model, model_option)
    quantized: Any = {"quantize": quantize, "calibration": calibration}
    check_model_options(model, dtype, kv_cache_dtype=kv_cache_dtype, draft_model=draft_model, **quantized)
    how = check_experts(experts)
    check_file("--html", html)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop)
    )
    switches = pass_switches(with_pass, only_pass, no_pass, no_passes)
    adapter = None if lora is None else parse_loras([f"{_LORA}={lora}"])[_LORA]
    config = EngineConfig(
        max_loras=0 if adapter is None else 1,
        max_lora_rank=1 if adapter is None else adapter.max_rank,
        speculative=speculative,
        draft_model=draft_model,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic_of(deterministic),
        options=compile_options(
            mode,
            lowering,
            switches,
            strict=strict,
            verify=verify,
            cache=cache,
            provider=provider,
            measure=measure,
            background=background,
        ),
    )
    check_name(device)  # before anything that imports torch
    if (code := run_on_ranks(tp, tp_timeout, device=device, draft_model=draft_model, lora=lora)) is not None:
        return code
    quiet = as_json or own_rank() > 0
    timeline = RunTimeline("importing torch")
    with loading("importing torch", quiet=quiet) as told:
        progress = timeline.watched(told)
        with importing():
            from core.engine.lora.merged import why_not
            from core.engine.models.quantizing import Quantize
            from core.engine.parallel.rank import open_device
            from core.engine.serve.leading import FollowingEngine, Orders

            scheme = Quantize.of(quantize, calibration)
            resolved, rank = open_device(device, timeout_s=tp_timeout)
        load = partial(_load, resolved, model, dtype, scheme, progress, how)
        try:
            engine = _engine(resolved, rank, load, prompt, params, config, progress)
        except _FaultyDevice as error:
            print_core_error(error.error, as_json=as_json, debug=False)
            return 1
    with engine:
        if isinstance(engine, FollowingEngine):
            engine.follow(Orders.of_job())
            return 0
        if lora is not None:
            engine.load_lora(_LORA, lora)
        timeline.itemise(engine.report())
        with timeline.generating(engine):
            completions = generate(engine, prompt, params, stream=not as_json)
        if not engine.wait_compiled(0):  # what is compared and timed below is compiled
            timeline.mark("compiling, beside the steps so far")
            with status("compiling; the text above came from steps that ran without", quiet=quiet):
                engine.wait_compiled()
        skipped = why_not_whole(engine.loaded, rank, oracle) if check else "--no-check"
        skipped = skipped or next((why_not(engine.loaded.model, each) for each in engine.loras.values()), "")
        timeline.mark("comparing with the eager model")
        with status("comparing with the eager model", quiet=quiet):
            comparison = None if skipped else _compare(engine, completions, oracle, whole_of(load, rank, how))
        if html is not None:
            write_page(html, engine, comparison, rank, skipped, timeline)
        if as_json:
            found = json_of(engine, completions, comparison, rank)
            print_json("core.run/1", **found, timeline=timeline.to_json(), html=None if html is None else str(html))
        else:
            print_table(console(), engine, comparison, rank, skipped)
            print_items([] if html is None else [f"\nwritten: {html}"])
    return 0 if comparison is None or comparison.passed else 1


def _load(
    device: Device,
    model: str | None,
    dtype: str,
    scheme: Quantize | None,
    progress: Progress,
    experts: ExpertCut,
    *,
    rank: Rank,
) -> LoadedModel:
    """Load this rank's part of the model, and quantise it."""
    from core.engine.models.resolve import resolve_model

    loaded, _ = resolve_model(model, device, dtype, progress, sharded=rank.size > 1, experts=experts)
    loaded = tried(loaded, rank, experts)
    return loaded if scheme is None else scheme.apply(loaded, progress)


def _engine(
    resolved: Device,
    rank: Rank,
    load: Callable[..., LoadedModel],
    prompts: Sequence[str],
    params: Any,
    config: EngineConfig,
    progress: Progress,
) -> Engine:
    """Load the model, and compile for just these prompts: one bucket for prefill, one for decode."""
    with importing():
        from core.cli.reports.run import for_model
        from core.compilation.cache.store import Store
        from core.engine.models.hf import import_transformers
        from core.engine.parallel.rank import note_phase
        from core.engine.serve.leading import make_engine
        from core.engine.serve.prompts import encode_prompts
        from core.settings import Settings

        progress("importing transformers", 0, 0)
        import_transformers()
    note_phase("load")
    if config.options.cache and Settings.from_environment().cache:
        Store.of_user().keep_kernels(resolved.kernel_compilers)
    config.check_device(resolved)  # refuse options that the device lacks before the model is loaded
    progress(f"preparing {resolved.name}", 0, 0)
    resolved.parts.prepare()
    progress("loading the model", 0, 0)
    loaded = load(rank=rank)
    progress("making the engine", 0, 0)
    encoded = encode_prompts(for_model(prompts, loaded), loaded, [params] * len(prompts))
    num_tokens = sum(len(e.token_ids) for e in encoded)
    longest = max(len(e.token_ids) + e.max_new_tokens for e in encoded)
    config = replace(
        config,
        max_num_seqs=len(prompts),
        max_model_len=min(loaded.max_position or longest, -(-longest // 64) * 64),
        decode_buckets=(len(prompts),),
        prefill_buckets=(max(32, 1 << (num_tokens - 1).bit_length()),),
        # The check always generates greedily, so the greedy graph is always captured.
        sampling=("greedy",) if params.greedy else ("greedy", "random"),
    )
    attention = loaded.config._attn_implementation
    try:
        return make_engine(loaded, resolved, config, rank, progress=progress)
    except ModelError as refusal:
        if rank.size > 1:
            raise
        fault = _device_fault(loaded, resolved, encoded[0].token_ids, attention)
        if not fault:
            raise
        raise _FaultyDevice(loaded, resolved, fault) from refusal


class _FaultyDevice(Exception):
    """The engine refused a model because the device computes wrongly."""

    def __init__(self, loaded: LoadedModel, device: Device, fault: str) -> None:
        super().__init__(fault)
        self.error = DeviceUnavailableError(
            f"running {type(loaded.model).__name__} on {device.name}",
            found=fault,
            remedy="run the conformance suite on this device, and the model on another; see to its driver and plugin",
        )


def _device_fault(loaded: LoadedModel, device: Device, prompt: Sequence[int], attention: str) -> str:
    """Return the evidence that the device, and not the model, is at fault when no engine takes the model; "" for
    none."""
    from core.engine.check.comparison import MAX_ORACLE_PARAMETERS
    from core.engine.check.device import probe_device

    if loaded.num_parameters > MAX_ORACLE_PARAMETERS:
        return ""
    try:
        return probe_device(loaded.model, device.name, prompt, attention)
    except Exception:  # a model that fails by itself keeps the engine's own reason
        return ""


def _compare(
    engine: Engine, completions: Sequence[Completion], oracle: bool | None, whole: LoadedModel | None
) -> Comparison:
    from core.engine.check.comparison import compare
    from core.engine.lora.merged import merged_model

    prompts = [list(c.prompt_token_ids) for c in completions]
    room = engine.max_model_len - max(map(len, prompts))
    model, adapter = None if whole is None else whole.model, engine.loras.get(_LORA)
    if adapter is not None:
        model = merged_model(engine.loaded.model, adapter)
    exact = None if adapter is None else merged_model(engine.loaded.model, adapter, exact=True)
    how: dict[str, Any] = {"num_tokens": min(32, room), "oracle": oracle, "lora": next(iter(engine.loras), None)}
    return compare(engine, prompts, whole=model, exact=exact, **how)
