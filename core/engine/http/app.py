"""The HTTP endpoints: what each takes and what it answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from core._version import __version__
from core.engine.config import SamplingParams
from core.engine.http.config import ServerConfig
from core.engine.http.errors import ApiError, of_core, of_validation
from core.engine.http.gate import Gate
from core.engine.http.generation import Admission, Asked, Generation
from core.engine.http.load import load_of
from core.engine.http.metrics import Metrics
from core.engine.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from core.engine.http.replies import ChatShape, CompletionShape, Reply, Shape
from core.engine.http.streaming import EventStream, unless_gone
from core.engine.http.texts import Texts
from core.engine.serve.async_engine import AsyncEngine
from core.engine.serve.engine import Engine
from core.engine.serve.prompts import EncodedPrompt, Prompt
from core.errors import CoreError, ModelError, one_line

_SHORT = 200
"""Characters of a path that an answer repeats."""


class Service:
    """State that the endpoints share: the engine and the tokenizer, each in its own thread, admission, and metrics."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.engine = AsyncEngine(engine)
        self.max_model_len = engine.max_model_len
        self.texts = Texts(engine.loaded, engine.max_model_len)
        self.metrics = Metrics()
        self.admission = Admission(self.engine, config)
        self.created = int(time.time())

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Serve while the application lives; the engine itself stays open."""
        self.engine.start()
        try:
            yield
        finally:
            await self.engine.close()
            self.texts.close()

    @property
    def models(self) -> list[str]:
        """The names by which clients may ask: of the model, and of the adapters that are loaded now."""
        return [self.config.model_name, *self.engine.engine.loras]

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for a model that is not served here."""
        if name is not None and name not in self.models:
            message = f"the model {name!r} is not served here; there is {', '.join(map(repr, self.models))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def generate(
        self, http: Request, body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt], prefix: str, field: str
    ) -> Response:
        """Answer a request for tokens, whole or as a stream."""
        self.check_model(body.model)
        body.check()
        max_tokens_field, max_tokens = body.asked_max_tokens
        params = body.sampling(self.max_model_len if max_tokens is None else max_tokens)
        self._check_biases(params)
        name = body.model or self.config.model_name
        lora = None if name == self.config.model_name else name
        generation = Generation(self.engine, self.admission, self.metrics, http.scope["core.request_id"], lora)
        try:
            if params.logprobs is not None:
                await self.texts.names((0,))  # a model without a tokenizer is refused before the answer starts
            asked = Asked(field, body.grammar[0], max_tokens_field, max_tokens, self.max_model_len)
            await generation.begin(self.texts, prompts, params, body.n, asked)
            shape = await self._shape(body, generation.prompts, prompts)
        except BaseException:
            generation.close(user=body.user)
            raise
        id = f"{prefix}-{generation.request_id}"
        reply = Reply(generation, shape, self.texts, name, id=id, token_ids=body.return_token_ids)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = reply.events(usage=usage)
            timeout_s = self.config.client_timeout_s
            return EventStream(events, lambda: generation.close(user=body.user), timeout_s=timeout_s)
        try:
            whole = await unless_gone(reply.whole(), http.receive)
        finally:
            generation.close(user=body.user)
        return JSONResponse(whole) if whole is not None else Response(status_code=499)

    def _check_biases(self, params: SamplingParams) -> None:
        outside = next((token for token, _ in params.logit_bias if token >= self.texts.vocab_size), None)
        if outside is not None:
            message = f"logit_bias: token {outside} is outside the vocabulary, 0 to {self.texts.vocab_size - 1}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")

    async def _shape(
        self, body: CompletionRequest | ChatRequest, encoded: Sequence[EncodedPrompt], prompts: Sequence[Prompt]
    ) -> Shape:
        if isinstance(body, ChatRequest):
            return ChatShape()
        echoes: list[str] = []
        if body.echo:
            for prompt, tokens in zip(prompts, encoded, strict=True):
                echoes.append(prompt if isinstance(prompt, str) else await self.texts.decode(tokens.token_ids))
        return CompletionShape(echoes, body.n)


def create_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service, which must serve one event loop only."""
    app = FastAPI(title="core", version=__version__, lifespan=service.running)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(CoreError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(Exception, _refuse)
    _add_generation(app, service)
    _add_texts(app, service)
    _add_health(app, service)
    return Gate(app, service.config, service.metrics)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue each prompt."""
        return await service.generate(http, body, body.prompts(), "cmpl", "prompt")

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: Request) -> Response:
        """Answer the last message of a chat."""
        messages = [message.for_template() for message in body.messages]
        return await service.generate(http, body, [messages], "chatcmpl", "messages")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model and its adapters."""
        return {"object": "list", "data": [_model(service, name) for name in service.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the model, or one of its adapters."""
        service.check_model(name)
        return _model(service, name)


def _add_texts(app: FastAPI, service: Service) -> None:
    any_length = SamplingParams(max_new_tokens=1)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or of a chat, as a request would get them."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either 'prompt' or 'messages'", param="prompt", code="invalid_value")
        chat = None if body.messages is None else [message.for_template() for message in body.messages]
        field = "prompt" if chat is None else "messages"
        try:
            (encoded,) = await service.texts.encode([chat or body.prompt or ""], any_length)
        except CoreError as error:
            raise of_core(error, param=field) from None
        return {"tokens": list(encoded.token_ids), "count": len(encoded), "max_model_len": service.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Return the text of tokens, special ones included."""
        service.check_model(body.model)
        wrong = next((each for each in body.tokens if not 0 <= each < service.texts.vocab_size), None)
        if wrong is not None:
            message = f"token {wrong} is outside the vocabulary, 0 to {service.texts.vocab_size - 1}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        try:
            return {"prompt": await service.texts.decode(body.tokens)}
        except ModelError as error:
            raise of_core(error, param="tokens") from None


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether the process does its work; 503 asks for a restart."""
        failure = service.engine.failure
        if failure is not None:
            return of_core(failure, status=503, code="engine_dead").response()
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Say whether the server takes requests; 503 asks to send them elsewhere."""
        if service.engine.failure is None and service.admission.draining:
            return ApiError(503, "the server is about to stop", code="stopping").response()
        return await health()

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' format."""
        try:
            load, stats = await service.engine.call(lambda engine: (load_of(engine), engine.stats()))
        except CoreError:  # the engine is dead or closing
            text = service.metrics.render(None, None)
        else:
            text = service.metrics.render(load, stats)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _model(service: Service, name: str) -> dict[str, Any]:
    base = service.config.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "core",
        "parent": None if name == base else base,
        "max_model_len": service.max_model_len,
    }


async def _refuse(http: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = of_validation(error)
    elif isinstance(error, HTTPException) and error.status_code == 400:
        found = one_line(str(error.__cause__ or error.detail))  # such as a number of more digits than Python reads
        error = ApiError(400, f"the body can't be read: {found}", code="invalid_json")
    elif isinstance(error, HTTPException):
        paths = sorted({route.path for route in http.app.routes if isinstance(route, APIRoute)})
        asked = f"{http.method} {http.url.path[:_SHORT]}"
        error = ApiError(error.status_code, f"{error.detail}: {asked}; there is {', '.join(paths)}")
    elif isinstance(error, CoreError):
        error = of_core(error)
    if not isinstance(error, ApiError):
        error = ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")
    return error.response()
