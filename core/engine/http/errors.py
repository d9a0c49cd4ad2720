"""Refusals as OpenAI's API words them: a status, and one JSON object that names the field."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from core.errors import CoreError

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""OpenAI's error type of each status; `invalid_request_error` for all others."""


_OF_A_UNION = re.compile(r"str|constrained-str|list\[.*")
"""What pydantic puts into a field's place for the kind of a union that it tried there."""


class ApiError(Exception):
    """A request that is answered with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        #: The field of the request that is at fault.
        self.param = param
        #: A one-word code for programs.
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON object that a client gets."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer to a request that has got none yet."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def of_core(error: CoreError, *, status: int = 400, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the answer for an error of `core`, in one line."""
    return ApiError(status, f"{error.asked}: {error.found}; to do: {error.remedy}", param=param, code=code)


def of_validation(error: RequestValidationError) -> ApiError:
    """Return the first fault of a body's shape, with the field that has it; of those of a union the innermost one."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    where = [part for part in map(str, first["loc"][1:]) if not _OF_A_UNION.fullmatch(part)]
    param = where[0] if where else None
    if first["type"] == "extra_forbidden":
        name = ".".join(where)
        return ApiError(400, f"{name!r} is not supported here; leave it out", param=param, code="unsupported_parameter")
    if first["type"] == "missing" and param is not None:
        return ApiError(400, f"{param!r} is missing", param=param, code="missing_required_parameter")
    if isinstance(first.get("input"), bytes):
        message = "the body is taken for JSON only with the header Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    found = reprlib.repr(first.get("input"))
    at = f"{'.'.join(where)}: " if where else "the body: "
    return ApiError(400, f"{at}{first['msg']}, not {found}", param=param, code="invalid_value")
