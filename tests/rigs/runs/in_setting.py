"""Tests in an event loop, with something that lives there as their first argument."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

Test = Callable[..., Any]


def in_setting(open_setting: Callable[[], AbstractAsyncContextManager[Any]]) -> Callable[[Test], Test]:
    """Runs a test with what the context gives; the test's other arguments are pytest's."""

    def decorate(test: Test) -> Test:
        async def live(named: dict[str, Any]) -> None:
            async with open_setting() as setting:
                done = test(setting, **named)
                if inspect.isawaitable(done):
                    await done

        @functools.wraps(test)
        def run(**named: Any) -> None:
            asyncio.run(live(named))

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return run

    return decorate
