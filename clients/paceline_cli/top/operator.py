"""Carries out what a key asked for, and says in sentences what became of it."""

from paceline_cli.failures import describe
from paceline_cli.sentences import explained
from paceline_cli.top import wire
from paceline_cli.top.controls import (
    Action,
    Cancel,
    Controls,
    Drain,
    Explain,
    Quit,
    SetLimit,
    ShowLimits,
    Undrain,
)
from paceline_cli.top.source import Source
from paceline_client.async_client import AsyncClient
from paceline_client.errors import PacelineError


class Operator:
    """Explains and cancels by the API, as `client` finds it; all else by the admin port."""

    def __init__(self, source: Source, client: AsyncClient) -> None:
        self._source = source
        self._client = client

    async def perform(self, action: Action, controls: Controls) -> None:
        """Do it, and leave what is to be shown with the controls; a failure is a sentence too."""
        controls.limits = None
        try:
            controls.note = await self._performed(action, controls)
        except PacelineError as error:
            controls.note = (f"error: {describe(error)}",)

    async def _performed(self, action: Action, controls: Controls) -> tuple[str, ...]:
        call = self._source.call
        match action:
            case Explain(key):
                explanation = await self._client.explain(key.request_id, tenant=key.tenant)
                return (f"{key.request_id}:", *explained(explanation).splitlines())
            case Cancel(key):
                await self._client.cancel(key.request_id, tenant=key.tenant)
                return (f"{key.request_id} was cancelled.",)
            case Drain(address):
                num_left = await call(lambda on, seconds: wire.drain(on, address, seconds))
                return (f"{address} is being drained; requests still there: {num_left}.",)
            case Undrain(address):
                await call(lambda on, seconds: wire.undrain(on, address, seconds))
                return (f"{address} takes requests again.",)
            case ShowLimits():
                controls.limits = await call(wire.get_limits)
                return ()
            case SetLimit(name, value):
                controls.limits = await call(lambda on, seconds: wire.set_limit(on, name, value, seconds))
                return (f"{name} is set.",)
            case Quit():
                raise AssertionError("the terminal ends by itself")
