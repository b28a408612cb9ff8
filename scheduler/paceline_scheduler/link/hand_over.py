"""When a scheduler that is to stop need not finish what it has: another one stands in line, and clients go on there.

Knows whom to ask. Giving the requests up and ending the plan streams is for whoever stops the scheduler.
"""

import asyncio

from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.link.fleet import Fleet

LOOK_S = 0.1


async def until_handed_over(views: CoreViews, fleet: Fleet) -> None:
    """Return once an heir stands in line at every executor driven here, and can go on with all requests left.

    Those that only this scheduler can finish, since their clients do not come back, are waited for first: nobody gets
    the executors before, so the others run on here meanwhile.
    """
    while not (_are_resumable(views) and await fleet.has_heir() and _are_resumable(views)):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


def _are_resumable(views: CoreViews) -> bool:
    """Tell whether the clients of all requests can go on elsewhere."""
    return all(live.request.is_resumable for live in views.heard())
