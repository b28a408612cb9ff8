"""The screen of `top` on a terminal: what its keys select, ask and change.

prompt_toolkit has the terminal, its size and its keys; `screen` says what is shown.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from prompt_toolkit.application import Application
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.layout import Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl

from paceline_cli.failures import describe
from paceline_cli.sentences import explained
from paceline_cli.top import wire
from paceline_cli.top.screen import SHOWN, View, item_of, live_screen
from paceline_cli.top.source import Source
from paceline_cli.top.state import TopState
from paceline_cli.top.values import RequestKey
from paceline_client.async_client import AsyncClient
from paceline_client.errors import PacelineError

_REDRAW_SECONDS = 1.0  # at least so often: what is old says how old it is
_MAX_DIGITS = 15
_BACKSPACES = ("\x7f", "\b")
_HELP = (
    "up, down, page up, page down: select an executor or a request. s: all, waiting or running requests.",
    "e: where the request stands and what it waits for. c: cancel it.",
    "d: drain the executor: nothing new is placed there. u: use it again. l: bounds of the queue and of steps.",
    "Before anything is changed you are asked. escape closes this. q leaves.",
)
ItemT = TypeVar("ItemT", str, RequestKey)
Doing = Coroutine[Any, Any, tuple[str, ...]]
"""Ends with sentences on what became of it."""


class LiveScreen:
    """Cancels by the API, as `client` finds it; all else by the admin port. Does one thing at a time: keys that ask for
    another one meanwhile do nothing.
    """

    def __init__(self, state: TopState, source: Source, client: AsyncClient, interval_s: float) -> None:
        self._state, self._source, self._client, self._interval_s = state, source, client, interval_s
        self._view = View()
        self._then: Callable[[str], None] | None = None
        """Takes the next key: the answer to a question, a digit."""
        self._doing: asyncio.Task[None] | None = None
        self._app: Application[Exception | None] = Application(
            layout=Layout(Window(FormattedTextControl(self._drawn, show_cursor=False), always_hide_cursor=True)),
            key_bindings=self._keys(),
            full_screen=True,
            refresh_interval=min(interval_s, _REDRAW_SECONDS),
        )
        self._app.ttimeoutlen = 0.1  # how long an escape may be the beginning of another key

    async def run(self) -> None:
        """Show until a key ends it, or what asks the scheduler fails: raises what that raises."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._exit)  # or the terminal stays as it was for this screen
        self._app.create_background_task(self._ask())
        try:
            error = await self._app.run_async(handle_sigint=False)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
        if error is not None:
            raise error

    async def _ask(self) -> None:
        try:
            await self._source.run(self._interval_s)
        except Exception as error:
            self._exit(error)

    def _exit(self, error: Exception | None = None) -> None:
        if self._app.is_running and not self._app.is_done:
            self._app.exit(result=error)

    def _drawn(self) -> ANSI:
        size = self._app.output.get_size()
        return ANSI(live_screen(self._state, self._view, size.columns, size.rows, time.monotonic()))

    def _keys(self) -> KeyBindings:
        keys, is_free = KeyBindings(), Condition(lambda: self._then is None)
        pressed: dict[str, Callable[[], None]] = {
            "up": partial(self._move, -1),
            "down": partial(self._move, 1),
            "pageup": partial(self._move, -10),
            "pagedown": partial(self._move, 10),
            "home": partial(self._move, -1_000_000),
            "end": partial(self._move, 1_000_000),
            "s": self._show_others,
            "h": partial(self._say, *_HELP),
            "?": partial(self._say, *_HELP),
            "e": self._explain,
            "enter": self._explain,
            "c": partial(self._question, RequestKey, "Cancel the request {0.request_id}?", self._cancel),
            "d": partial(self._question, str, "Place nothing new on {}, and move what runs there?", self._drain),
            "u": partial(self._question, str, "Place requests on {} again?", self._undrain),
            "l": partial(self._do, self._limits),
            "q": self._exit,
            **{str(number): partial(self._type, name, "") for number, name in enumerate(wire.LIMITS, 1)},
        }
        for key, press in pressed.items():
            keys.add(key, filter=is_free)(lambda _, press=press: press())
        for key in ("<any>", "enter", "backspace"):
            keys.add(key, filter=~is_free)(lambda event: self._take(event.data))
        keys.add("escape", eager=True)(lambda _: self._say())
        keys.add("c-c")(lambda _: self._exit())
        return keys

    def _take(self, key: str) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(key)

    def _say(self, *sentences: str, then: Callable[[str], None] | None = None) -> None:
        """At the lower end, instead of what was said or asked there."""
        self._view.note, self._then = sentences, then

    def _move(self, by: int) -> None:
        view = self._view
        items = [item_of(one) for one in view.items(self._state.overview)]
        place = items.index(view.selected) if view.selected in items else -1 if by > 0 else 0
        view.selected = items[max(0, min(len(items) - 1, place + by))] if items else None

    def _show_others(self) -> None:
        kinds = list(SHOWN)
        self._view.shown = kinds[(kinds.index(self._view.shown) + 1) % len(kinds)]

    def _explain(self) -> None:
        for request in self._state.overview.requests:
            if request.key == self._view.selected:
                return self._say(f"{request.key.request_id}:", *explained(request.explanation).splitlines())
        return self._say("Select a request first, with up and down.")

    def _question(self, kind: type[ItemT], question: str, do: Callable[[ItemT], Doing]) -> None:
        item = self._view.selected
        if not isinstance(item, kind):
            self._say(f"Select {'an executor' if kind is str else 'a request'} first, with up and down.")
            return

        def answer(key: str) -> None:
            self._do(partial(do, item)) if key == "y" else self._say("Nothing was changed.")

        self._say(f"{question.format(item)} y: yes", then=answer)

    def _do(self, make: Callable[[], Doing]) -> None:
        if self._doing is None or self._doing.done():
            self._doing = self._app.create_background_task(self._done(make()))

    async def _done(self, doing: Doing) -> None:
        try:
            self._say(*await doing)
        except PacelineError as error:
            self._say(f"error: {describe(error)}")
        self._app.invalidate()

    async def _cancel(self, key: RequestKey) -> tuple[str, ...]:
        await self._client.cancel(key.request_id, tenant=key.tenant)
        return (f"{key.request_id} was cancelled.",)

    async def _drain(self, address: str) -> tuple[str, ...]:
        num_left = await self._source.call(lambda on, seconds: wire.drain(on, address, seconds))
        return (f"{address} is being drained; requests still there: {num_left}.",)

    async def _undrain(self, address: str) -> tuple[str, ...]:
        await self._source.call(lambda on, seconds: wire.undrain(on, address, seconds))
        return (f"{address} takes requests again.",)

    async def _limits(self) -> tuple[str, ...]:
        return _listed(await self._source.call(wire.get_limits))

    async def _set_limit(self, name: str, value: int) -> tuple[str, ...]:
        limits = await self._source.call(lambda on, seconds: wire.set_limit(on, name, value, seconds))
        return (*_listed(limits), f"{name} is set.")

    def _type(self, name: str, digits: str) -> None:
        def type_on(key: str) -> None:
            if key == "\r":
                self._do(partial(self._set_limit, name, int(digits))) if digits else self._say()
            elif key.isdecimal():
                self._type(name, (digits + key)[:_MAX_DIGITS])
            else:
                self._type(name, digits[:-1] if key in _BACKSPACES else digits)

        self._say(f"{name} = {digits}_  (enter sets it, escape leaves it)", then=type_on)


def _listed(limits: Mapping[str, int]) -> tuple[str, ...]:
    listed = (f"{number}: {name} = {limits[name]:,}" for number, name in enumerate(wire.LIMITS, 1))
    return (*listed, "A number changes that bound; escape leaves.")
