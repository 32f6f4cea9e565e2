"""Futures of calls that are already done: in process nothing runs on the side, and the same loop may run over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from luthier.errors import UserError

Given = ParamSpec("Given")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class APIFuture(Generic[Result]):
    """What a call returns: `.result()`, or `await`.

    Args:
        work: is done now. A `UserError` of it is raised by `result`; any other error at once.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._future: Future[Result] = Future()
        self._asked = False
        try:
            self._future.set_result(work())
        except UserError as error:
            self._future.set_exception(error)

    @property
    def unseen_failure(self) -> BaseException | None:
        """What went wrong, as long as nobody asked."""
        if self._asked or not self._future.done():  # it is not done where another error has left the call
            return None
        return self._future.exception()

    def result(self, timeout: float | None = None) -> Result:
        """What the call found.

        Args:
            timeout: is accepted; nothing has to be waited for.
        """
        self._asked = True
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> Result:
        await asyncio.sleep(0)  # others may run between two calls
        return self.result(timeout)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.result_async().__await__()

    def coroutine(self) -> Coroutine[Any, Any, Result]:
        return self.result_async()

    def future(self) -> Future[Result]:
        self._asked = True
        return self._future

    def __del__(self) -> None:
        if (error := self.unseen_failure) is not None:
            logger.error("a call failed, and nobody asked for its result: %s", error)


def gives_future(call: Callable[Given, Result]) -> Callable[Given, Coroutine[Any, Any, Result]]:
    """The `..._async` twin of a call: a coroutine that makes it and gives what it returns, a future for the most."""

    @wraps(call)
    async def twin(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return call(*args, **kwargs)

    return twin


def gives_result(call: Callable[Given, APIFuture[Result]]) -> Callable[Given, Coroutine[Any, Any, Result]]:
    """The `..._async` twin of a call whose result it waits for."""

    @wraps(call)
    async def twin(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await call(*args, **kwargs)

    return twin
