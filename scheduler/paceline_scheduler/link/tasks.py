"""Tasks that live and die together."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn


async def run_until_one_ends(*coroutines: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """Run endless coroutines until one raises; end the others, then raise what it raised.

    If several have raised at the same moment the first one given counts.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended[0].result()
    raise AssertionError("an endless task returned")
