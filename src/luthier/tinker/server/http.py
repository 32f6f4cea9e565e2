"""What all routes share: who asks, bodies of bounded size, and errors as the SDK understands them.

The SDK tries 408, 409, 429 and 5xx again, and takes 400 for a fault on the way where it polls; so what is wrong for
good is 400 or 422 on submission, and an error in the body where it polls.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, TypeVar

import pydantic
import zstandard
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteException
from starlette.requests import ClientDisconnect

from luthier.errors import UserError
from luthier.tinker.server.auth import Doorkeeper
from luthier.tinker.server.service import Conflict, Overloaded, Service, Unknown

MOST_BYTES = 64 * 1024 * 1024
"""Of a body, unpacked; the SDK sends at most 5 MB at once."""

Message = TypeVar("Message", bound=pydantic.BaseModel)


class State:
    """What the application carries.

    Args:
        service: behind it.
        doorkeeper: before it.
    """

    def __init__(self, service: Service, doorkeeper: Doorkeeper) -> None:
        self.service = service
        self.doorkeeper = doorkeeper


async def service_of(request: Request) -> Service:
    """The service behind a request. Of FastAPI's dependencies only coroutines stay on the event loop; for any other a
    thread looks through all tasks there are, which takes longer the more clients wait."""
    state: State = request.app.state.luthier
    return state.service


async def owner_of(request: Request) -> str:
    """Who asks.

    Raises:
        HTTPException: 401, nobody that is known.
    """
    key = request.headers.get("x-api-key")
    if key is None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else None
    state: State = request.app.state.luthier
    owner = await state.doorkeeper.owner(key)
    if owner is None:
        raise HTTPException(401, "the API key is missing or unknown")
    return owner


TheService = Annotated[Service, Depends(service_of)]
Owner = Annotated[str, Depends(owner_of)]


async def body_of(request: Request) -> bytes:
    """The body, unpacked.

    Raises:
        HTTPException: 413, it is too large; 400, it cannot be unpacked, or did not come whole.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MOST_BYTES:
                raise HTTPException(413, f"a body has at most {MOST_BYTES} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise HTTPException(400, "the body did not come whole") from None
    body = b"".join(parts)
    match request.headers.get("content-encoding", "identity"):
        case "identity":
            return body
        case "zstd":
            try:
                with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                    unpacked = reader.read(MOST_BYTES + 1)
            except zstandard.ZstdError:
                raise HTTPException(400, "the body is not packed with zstd") from None
            if len(unpacked) > MOST_BYTES:
                raise HTTPException(413, f"a body has at most {MOST_BYTES} bytes")
            return unpacked
        case other:
            raise HTTPException(415, f"bodies packed with {other} are not read; zstd is")


def parse(kind: type[Message], body: bytes) -> Message:
    """A message of the SDK's.

    Raises:
        HTTPException: 422, it is none; what is wrong is named.
    """
    try:
        if b"NaN" in body or b"Infinity" in body:  # which pydantic reads, and PostgreSQL does not keep
            json.loads(body, parse_constant=_refuse_constant)
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise HTTPException(422, _named(error.errors(include_url=False, include_input=False))) from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # of the messages' own reading
        raise HTTPException(422, f"body: {str(error).splitlines()[0] if str(error) else 'unreadable'}") from None


def taking(kind: type[Message]) -> Any:
    """A dependency: the body as a message of the SDK's."""

    async def read(body: Annotated[bytes, Depends(body_of)]) -> Message:
        return parse(kind, body)

    return Depends(read)


def digest(*parts: bytes) -> str:
    """Tells a repetition from another request."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def answer(value: Any) -> Response:
    """JSON; dates and models of pydantic are written by pydantic."""
    return Response(json.dumps(value, default=pydantic.TypeAdapter(Any).dump_python), media_type="application/json")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _named(errors: Any) -> str:
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where or 'body'}: {first['msg']}{more}"


def install_errors(app: FastAPI) -> None:
    """Answer errors with a status and one sentence."""

    def tell(code: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": text, "detail": text}, code, headers)

    @app.exception_handler(Unknown)
    async def unknown(request: Request, error: Unknown) -> JSONResponse:
        return tell(404, "there is no such thing")

    @app.exception_handler(Conflict)
    async def conflict(request: Request, error: Conflict) -> JSONResponse:
        return tell(400, "this number is taken by another request")

    @app.exception_handler(Overloaded)
    async def overloaded(request: Request, error: Overloaded) -> JSONResponse:
        return tell(429, "too many requests wait already", {"Retry-After": "2"})

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> JSONResponse:
        return tell(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return tell(422, _named(error.errors()))

    @app.exception_handler(StarletteException)
    async def other(request: Request, error: StarletteException) -> JSONResponse:
        if error.status_code == 404:
            return await unknown(request, Unknown())
        return tell(error.status_code, str(error.detail), dict(error.headers) if error.headers else None)
