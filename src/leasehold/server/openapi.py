"""The OpenAPI 3.1 document, made from the routes and the schemas, so that it cannot contradict them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from leasehold.server import problems, schemas
from leasehold.server.messages import Request, Response, encode

if TYPE_CHECKING:
    from leasehold.server.app import App, Route

_REF = "#/components/schemas/{name}"
_FLAG = {"type": "integer", "enum": [0, 1], "default": 0}
_LOCAL = "1: what this server knows, without its peers."
_PARAMETERS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "/v1/locks": [
        ("namespace", {"type": "string", "default": ""}, "The namespace of the names."),
        ("prefix", {"type": "string", "default": ""}, "Only names that begin with this prefix."),
        ("name", {"type": "string"}, "Only this name; not together with prefix."),
        ("limit", {"type": "integer", "minimum": 1, "default": schemas.MAX_HOLDINGS}, "Holdings of one page."),
        ("cursor", {"type": "string"}, "The `cursor` of the page before."),
        ("fresh", _FLAG, "1: ask the engine, whatever the picture shows."),
    ],
    "/v1/owners": [
        ("namespace", {"type": "string", "default": ""}, "The namespace of the names."),
        ("prefix", {"type": "string", "default": ""}, "Only names that begin with this prefix."),
        ("limit", {"type": "integer", "minimum": 1}, "At most this many, those gone quiet first. Left out: all."),
        ("local", _FLAG, _LOCAL),
    ],
    "/v1/history": [
        ("namespace", {"type": "string", "default": ""}, "The namespace of the name."),
        ("name", {"type": "string"}, "The name."),
        ("local", _FLAG, _LOCAL),
    ],
    "/v1/incidents": [
        ("namespace", {"type": "string"}, "Only this namespace. Left out, without prefix: all namespaces."),
        ("prefix", {"type": "string", "default": ""}, "Only names that begin with this prefix."),
        ("limit", {"type": "integer", "minimum": 1, "default": schemas.MAX_HOLDINGS}, "At most this many."),
        ("local", _FLAG, _LOCAL),
    ],
    "/v1/stats": [
        ("namespace", {"type": "string", "default": ""}, "The namespace."),
        ("seconds", {"type": "integer", "minimum": 1, "default": 3600}, "How far back, at most an hour."),
        ("local", _FLAG, _LOCAL),
    ],
    "/v1/events": [
        ("namespace", {"type": "string", "default": ""}, "The namespace of the names."),
        ("prefix", {"type": "string", "default": ""}, "Only names that begin with this prefix."),
    ],
}
_TEXT = {"schema": {"type": "string"}}
# Answers that are no JSON object of `schemas`.
_OTHER_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/events": {"text/event-stream": _TEXT},
    "/v1/stream": {"text/event-stream": _TEXT},
    "/v1/calls": {"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}},
    "/v1/traits": {"application/json": {"schema": {"type": "object"}}},
    "/metrics": {"text/plain": _TEXT},
    "/openapi.json": {"application/json": {"schema": {"type": "object"}}},
    "/healthz": {"text/plain": _TEXT},
}
_HEADERS: list[tuple[str, dict[str, Any], str]] = [
    (
        "Leasehold-Within",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1e6},
        "Seconds that the caller waits for the engine.",
    ),
    ("X-Request-Id", {"type": "string", "maxLength": 128}, "Appears in the answer and in the logs."),
    ("traceparent", {"type": "string"}, "Trace context (W3C); appears in the answer and in the logs."),
]


@cache
def document() -> dict[str, Any]:
    from leasehold.server.app import ROUTES  # it imports this module for its route

    types: list[type[msgspec.Struct]] = [schemas.Problem]
    for methods in ROUTES.values():
        for route in methods.values():
            types += [found for found in (route.body, route.answer) if found is not None]
    _, components = msgspec.json.schema_components(list(dict.fromkeys(types)), ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Leasehold lock server",
            "version": "1",  # of this description: paths begin with /v1
            "summary": "Distributed locks with leases and fencing tokens, over HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            path: {method.lower(): _operation(path, method, route) for method, route in methods.items()}
            for path, methods in ROUTES.items()
        },
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key: `leasehold serve key create`."}
            },
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": path.strip("/").removeprefix("v1/").replace("-", "_").replace(".", "_"),
        "summary": route.summary,
        "responses": {"200": _answer(path, route)} | _problems(route),
    }
    parameters: list[tuple[str, dict[str, Any], str, str]] = [(*each, "query") for each in _PARAMETERS.get(path, [])]
    if route.needs_key:
        parameters += [(*each, "header") for each in _HEADERS]
    else:
        made["security"] = []
    if path in ("/v1/calls", "/v1/stream"):
        client = ("Leasehold-Client", {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}, "The client's id.")
        parameters.append((*client, "header"))
    if path == "/v1/break":
        match = ("If-Match", {"type": "string"}, "The token in quotation marks: 412 instead of 200 if none has it.")
        parameters.append((*match, "header"))
    made["parameters"] = [
        {"name": name, "in": where, "description": text, "schema": schema, "required": False}
        for name, schema, text, where in parameters
    ]
    if method == "POST":
        body = {"$ref": _REF.format(name=route.body.__name__)} if route.body else {"type": "array"}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return made


def _answer(path: str, route: Route) -> dict[str, Any]:
    content = _OTHER_ANSWERS.get(path)
    if route.answer is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(name=route.answer.__name__)}}}
    return {"description": "OK", "content": content}


def _problems(route: Route) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for kind in route.problems:
        for status in problems.KINDS[kind][0]:
            by_status.setdefault(status, []).append(kind)
    content = {problems.MEDIA_TYPE: {"schema": {"$ref": _REF.format(name="Problem")}}}
    return {
        str(status): {"description": ", ".join(kinds), "content": content}
        for status, kinds in sorted(by_status.items())
    }


async def openapi(app: App, request: Request) -> Response:
    return Response(200, "application/json", encode(document()))
