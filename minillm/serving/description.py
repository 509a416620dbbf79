"""The OpenAPI description: what FastAPI makes of the paths, with our errors and keys. Built in chapter 23."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from minillm.serving.errors import KINDS, ErrorAnswer

OF_ALL_PATHS = (408, 413, 415, 431, 500)
ERRORS = {str(status) for status in KINDS}
SCHEMAS = "#/components/schemas/"


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a path."""
    return {status: {"model": ErrorAnswer, "description": KINDS[status]} for status in statuses}


def describe(app: FastAPI, has_keys: bool) -> None:
    """Correct what FastAPI tells: a request that is not valid is answered 400, and not 422; every error is JSON; a path
    that answers 401 wants a key, where the server has keys."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        schema = of_fastapi()
        components = schema["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for methods in schema["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                for status, answer in operation["responses"].items():
                    if status in ERRORS:
                        answer["content"] = {"application/json": {"schema": {"$ref": f"{SCHEMAS}ErrorAnswer"}}}
                if has_keys and "401" in operation["responses"]:
                    operation["security"] = [{"key": []}]
        return schema

    app.openapi = openapi
