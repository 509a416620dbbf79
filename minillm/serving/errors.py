"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}. Built in chapter 23."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "server_error",
}


class ErrorBody(BaseModel):
    message: str  # names the value, the limit and the way out
    type: str
    param: str | None = None  # the field
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorBody


class ApiError(Exception):
    """Answered with `status`; `retry_after` seconds go into a header."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind, self.retry_after = kind or KINDS[status], retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def answer(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def of_exception(error: BaseException) -> ApiError:
    """What a client is told of an exception. ValueError, TypeError and NotImplementedError are what the engine raises
    for a request that is wrong, and name the field; anything else is a fault of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        message = str(error)
        return ApiError(400, message, _field_named(message))
    return ApiError(500, f"the engine failed ({type(error).__name__}); the request was ended, others go on")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found wrong with a body, as one sentence about the first of it."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    # A union reports each of its branches; their names are no part of the client's JSON.
    place = [part for part in place if not re.search(r"[\[\]()-]|^(str|int|float|bool|list|dict|none)$", part)]
    param = ".".join(place) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is no field of this request; leave it out", param, "unknown_field")
    value = repr(first.get("input"))
    value = value if len(value) <= 100 else f"{value[:60]} ... {value[-30:]}"
    said = first["msg"].removeprefix("Value error, ")
    if not place and first["type"] != "value_error":
        return ApiError(400, "the body is not a JSON object; send one, with Content-Type: application/json")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing; it has to be given", param, "missing")
    if first["type"] == "value_error":
        return ApiError(400, said, param or _field_named(said))
    return ApiError(400, f"{param}={value} is not allowed: {said[:1].lower()}{said[1:]}", param)


def _field_named(message: str) -> str | None:
    """The field that a message of the engine begins with, as in "temperature=-1 is not allowed"."""
    found = re.match(
        r"([a-z_]+)(?:\[(?:\d+|'\w+')\])*(?:=|: | is | has | exceeds | belongs | needs | names | and )", message
    )
    return found and {"prompts": "prompt"}.get(found.group(1), found.group(1))
