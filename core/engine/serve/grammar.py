"""Answers that match a JSON schema or a regular expression: which tokens may come next, by llguidance (an extra)."""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel
from core.errors import ModelError, UsageError, one_line
from core.host.distributions.installing import pip_install

_JSON = {"whitespace_flexible": False}
"""White space is not free: small models that may write it anywhere write nothing else. A schema's `x-guidance` may
allow it."""
_KEPT = 64
"""Grammars that stay compiled, for each model."""


class GrammarsNotInstalledError(UsageError):
    """An answer has to match a grammar, and the library for it is not installed."""


class Constraint:
    """Which tokens the grammar allows one sequence next."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        #: Why the grammar can no longer be followed (it grew too large, say); None while it can.
        self.failure: str | None = None

    def allowed(self, drafts: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        """Return for each token id whether it may follow the sequence and these drafts, (vocabulary,) bool.

        None if the grammar refuses one of the drafts: the sampler then uses no token after it.
        """
        matcher = self._matcher
        if drafts:
            matcher = matcher.deep_copy()
            if matcher.try_consume_tokens(list(drafts)) < len(drafts) or matcher.is_stopped():
                return None
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)

    def push(self, token: int) -> bool:
        """Take the next token, and tell whether nothing may follow it."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            self.failure = f"llguidance gave up on the grammar: {one_line(self._matcher.get_error())}"
        return bool(self._matcher.is_stopped())


class _Grammars:
    """The compiled grammars of one model. Compiling may take a second, copying takes almost no time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._library = _llguidance("llguidance")
        tokenizer, ends = loaded.require_tokenizer(), list(loaded.stop_token_ids)
        self._vocab_size = loaded.vocab_size
        try:
            self._tokenizer = _llguidance("llguidance.hf").from_tokenizer(
                tokenizer, n_vocab=loaded.vocab_size, eos_token=ends or None
            )
        except ValueError as error:
            raise ModelError(
                "an answer that matches a grammar",
                found=f"llguidance can't use the model's tokenizer: {one_line(str(error))}",
                remedy="leave json_schema and regex out, or use a model with a fast tokenizer",
            ) from None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, kind: str, text: str) -> Constraint:
        with self._lock:
            matcher = self._compiled.get((kind, text))
        if matcher is None:
            matcher = self._compile(kind, text)
            with self._lock:
                self._compiled[kind, text] = matcher
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return Constraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, kind: str, text: str) -> Any:
        asked = f"an answer that matches {kind}={text[:60]!r}"
        make = self._library.LLMatcher
        try:
            grammar = (
                make.grammar_from_json_schema(text, _JSON) if kind == "json_schema" else make.grammar_from_regex(text)
            )
        except ValueError as error:
            raise UsageError(asked, found=one_line(str(error)), remedy=f"pass another {kind}") from None
        matcher = make(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            found = one_line(matcher.get_error())[:300]
            raise UsageError(asked, found=found, remedy="write it in what llguidance supports")
        return matcher


_OF_MODELS: WeakKeyDictionary[nn.Module, _Grammars] = WeakKeyDictionary()
_LOCK = threading.Lock()


def constraint(loaded: LoadedModel, params: SamplingParams) -> Constraint | None:
    """Return the constraint of a new sequence, None if its parameters set none. Safe in any thread.

    Raises `UsageError` for a schema or expression that can't be used, `GrammarsNotInstalledError` where llguidance is
    not installed, and `ModelError` where the model has no tokenizer for it.
    """
    kind = "json_schema" if params.json_schema is not None else "regex"
    text = params.json_schema if params.json_schema is not None else params.regex
    if text is None:
        return None
    with _LOCK:
        grammars = _OF_MODELS.get(loaded.model)
        if grammars is None:
            grammars = _OF_MODELS[loaded.model] = _Grammars(loaded)
    return grammars.constraint(kind, text)


def _llguidance(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise GrammarsNotInstalledError(
            "an answer that matches a grammar",
            found=f"the module {error.name!r} is not installed",
            remedy=pip_install("structured"),
        ) from None
