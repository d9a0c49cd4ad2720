"""`core serve`: a model behind HTTP, as OpenAI's clients speak it (docs/serving.md)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from core.cli.model_argument import (
    BACKGROUND,
    CALIBRATION,
    DETERMINISTIC,
    DEVICE,
    DRAFT_MODEL,
    DTYPE,
    KV_CACHE_DTYPE,
    LORA,
    MAX_STEP_TOKENS,
    MEASURE,
    MIXED_STEP_TOKENS,
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
from core.cli.output import status
from core.cli.ranks import EXPERTS, TP, TP_TIMEOUT, check_experts, check_ranks, run_on_ranks, tried
from core.cli.serving.replicas import ADDRESS, RAY, REPLICAS, RESOURCE, check_ray, serve_by_replicas
from core.common.collector import importing
from core.errors import UsageError

if TYPE_CHECKING:
    from core.engine.http.config import ServerConfig
    from core.engine.models.quantizing import Quantize
    from core.engine.models.sharding import ExpertCut
    from core.engine.serve.engine import Engine
    from core.engine.steps.runner import EngineConfig


def serve(
    model: str | None = MODEL,
    model_option: str | None = MODEL_OPTION,
    device: str = DEVICE,
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 for all."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    max_num_seqs: int = typer.Option(8, min=1, help="Sequences that are generated at once."),
    max_model_len: int | None = typer.Option(
        None, min=2, help="Longest context in tokens; default: the model's own, at most 2048."
    ),
    max_queue: int = typer.Option(256, min=0, help="Sequences that may wait beyond these; more are refused with 429."),
    served_model_name: str | None = typer.Option(
        None, help="Name by which clients ask for the model; default: the folder's."
    ),
    api_key: str | None = typer.Option(
        None, help="What clients must send; CORE_API_KEY does the same and is seen by fewer eyes."
    ),
    dtype: str = DTYPE,
    mode: str | None = typer.Option(
        None, help="Capture mode (full, piecewise, segmented, compile, off), or one per phase: decode=full,prefill=off."
    ),
    lowering: str | None = typer.Option(None, help="How graphs become callables, for example inline or inductor."),
    quantize: str | None = QUANTIZE,
    calibration: Path | None = CALIBRATION,
    kv_cache_dtype: str = KV_CACHE_DTYPE,
    speculative: int = SPECULATIVE,
    draft_model: Path | None = DRAFT_MODEL,
    lora: list[str] = LORA,
    cache_tokens: int | None = typer.Option(
        None, min=1, help="Tokens that the key/value cache has room for; default: what memory and sequences ask for."
    ),
    memory_fraction: float | None = typer.Option(
        None, help="Share of the device's memory that weights, graphs and cache fill together, such as 0.9."
    ),
    provider: list[str] = PROVIDER,
    measure: bool = MEASURE,
    max_step_tokens: int | None = MAX_STEP_TOKENS,
    mixed_step_tokens: int | None = MIXED_STEP_TOKENS,
    deterministic: str | None = DETERMINISTIC,
    background: bool = BACKGROUND,
    capture_penalties: bool = typer.Option(
        False,
        "--capture-penalties",
        help="Capture penalties, biases and min_p with decode: more graphs.",
    ),
    prefix_caching: bool = typer.Option(True, help="Share the cache of prompts that begin alike."),
    max_body_bytes: int = typer.Option(4 * 2**20, min=1024, help="Largest body of a request; larger ones get 413."),
    drain_timeout: float = typer.Option(30.0, min=0, help="Seconds that requests may go on after SIGTERM."),
    tp: int | None = TP,
    tp_timeout: float = TP_TIMEOUT,
    experts: str = EXPERTS,
    ray: bool = RAY,
    replicas: str = REPLICAS,
    ray_address: str | None = ADDRESS,
    replica_resource: list[str] = RESOURCE,
) -> int:
    """Serve a model over HTTP with OpenAI's API until SIGTERM or Ctrl-C."""
    from core.engine.steps.runner import EngineConfig
    from core.host.selection import check_name

    model = one_model(model, model_option)
    quantized: Any = {"quantize": quantize, "calibration": calibration}
    check_model_options(model, dtype, kv_cache_dtype=kv_cache_dtype, draft_model=draft_model, **quantized)
    adapters, cut = parse_loras(lora), check_experts(experts)
    engine_config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        mixed_step_tokens=mixed_step_tokens,
        cache_tokens=cache_tokens,
        memory_fraction=memory_fraction,
        prefix_caching=prefix_caching,
        kv_cache_dtype=kv_cache_dtype,
        speculative=speculative,
        sampling=("greedy", "random", *(("shaped",) if capture_penalties else ())),
        draft_model=draft_model,
        deterministic=deterministic_of(deterministic),
        max_loras=len(adapters),
        max_lora_rank=max((each.max_rank for each in adapters.values()), default=1),
        options=compile_options(mode, lowering, provider=provider, measure=measure, background=background),
    )
    config = _server_config(
        model,
        served_model_name,
        api_key,
        host=host,
        port=port,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        drain_timeout_s=drain_timeout,
        loras=tuple((name, each.path) for name, each in adapters.items()),
    )
    check_name(device)
    ranked: dict[str, Any] = {"device": device, "draft_model": draft_model, "lora": lora}
    ranks = check_ranks(tp, **ranked)
    check_ray(ray=ray, replicas=replicas, address=ray_address, resources=replica_resource)
    if ray:
        given: dict[str, Any] = {"replicas": replicas, "address": ray_address, "resources": replica_resource}
        serve_by_replicas(config, **given, processes=ranks, sequences=max_num_seqs)
        return 0
    # From here on torch is imported.
    if (code := run_on_ranks(tp, tp_timeout, **ranked, drain_timeout_s=drain_timeout)) is not None:
        return code
    _serve(config, device, model, dtype, engine_config, (quantize, calibration), tp_timeout, cut)
    return 0


def _server_config(model: str | None, name: str | None, api_key: str | None, **fields: Any) -> ServerConfig:
    """Return the server's configuration; raise `UsageError` for options that can be refused without torch and model."""
    from core.engine.http.config import ServerConfig
    from core.engine.models.assets import embedded_model
    from core.settings import Settings

    key = Settings.from_environment({"CORE_API_KEY": api_key}).api_key if api_key is not None else None
    folder = embedded_model() if model is None else Path(model).expanduser().resolve()
    if name is not None and not name.strip():
        raise UsageError("--served-model-name ''", found="it is empty", remedy="give a name, or leave it out")
    model_name = name or folder.name
    if model_name in dict(fields["loras"]):
        found = "the model itself has that name"
        raise UsageError(f"--lora {model_name}", found=found, remedy="give the adapter another name")
    return ServerConfig(model_name=model_name, api_key=key or Settings.from_environment().api_key, **fields)


def _serve(
    config: ServerConfig,
    device: str,
    model: str | None,
    dtype: str,
    engine_config: EngineConfig,
    scheme: tuple[str | None, Path | None],
    tp_timeout: float,
    experts: ExpertCut,
) -> None:
    """Take the port, load and compile, and serve; the port first, so that a taken one costs no minutes."""
    try:
        from core.engine.http.logs import log_as_json
        from core.engine.http.server import bind
        from core.engine.http.server import serve as run
    except ModuleNotFoundError as error:
        from core.host.distributions.installing import pip_install

        found = f"the module {error.name!r} is not installed"
        raise UsageError("core serve", found=found, remedy=pip_install("hf", "serve")) from None
    with importing():
        from core.engine.models.quantizing import Quantize
        from core.engine.parallel.rank import own_rank
        from core.engine.serve.leading import FollowingEngine, LeadingEngine, Orders

    quantize = Quantize.of(*scheme)
    log_as_json()
    listener = bind(config) if own_rank() == 0 else None
    try:
        with _engine(device, model, dtype, engine_config, quantize, tp_timeout, experts) as engine:
            if isinstance(engine, FollowingEngine):
                engine.follow(Orders.of_job())
            elif listener is not None:
                for lora, folder in config.loras:
                    engine.load_lora(lora, folder)
                run(engine, config, listener)
            if isinstance(engine, LeadingEngine) and engine.failure is not None:
                raise engine.failure
    finally:
        if listener is not None:
            listener.close()


def _engine(
    name: str,
    model: str | None,
    dtype: str,
    config: EngineConfig,
    scheme: Quantize | None,
    tp_timeout: float,
    experts: ExpertCut,
) -> Engine:
    with importing():
        from core.compilation.cache.store import Store
        from core.engine.models.resolve import resolve_model
        from core.engine.parallel.rank import note_phase, open_device
        from core.engine.serve.leading import make_engine
        from core.settings import Settings

        device, rank = open_device(name, timeout_s=tp_timeout)
    note_phase("load")
    if Settings.from_environment().cache:
        Store.of_user().keep_kernels(device.kernel_compilers)
    config.check_device(device)  # refuse options that the device lacks before the model is loaded
    device.parts.prepare()
    with status("loading", quiet=not sys.stderr.isatty()) as say:
        loaded, _ = resolve_model(model, device, dtype, sharded=rank.size > 1, experts=experts)
        loaded = tried(loaded, rank, experts)
        if scheme is not None:
            say("quantising")
            loaded = scheme.apply(loaded)
        say("compiling")
        log = logging.getLogger("core.serve")

        def progress(what: str, done: int, total: int) -> None:
            say(what)
            log.info("starting", extra={"fields": {"what": what, "done": done, "of": total}})

        return make_engine(loaded, device, config, rank, progress=progress, failed=_stop)


def _stop(error: Exception) -> None:
    """End the server: the ranks may have come apart. A launcher is told, and ends all of them."""
    from core.engine.parallel.rank import report

    report(error)
    os.kill(os.getpid(), signal.SIGTERM)
