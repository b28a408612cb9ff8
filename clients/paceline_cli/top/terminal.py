"""The screen of `top` on a terminal: draws when something may have changed, and passes keys on.

Knows prompt_toolkit, which follows the terminal's size and leaves colours out where NO_COLOR is set.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl
from prompt_toolkit.styles import Style

from paceline_cli.top.controls import Action, Controls, Quit
from paceline_cli.top.screen import Line, draw
from paceline_cli.top.state import TopState

_REDRAW_SECONDS = 0.5  # what is old says how old it is
_STYLE = Style.from_dict(
    {
        "bold": "bold",
        "head": "reverse",
        "selected": "reverse bold",
        "good": "ansigreen",
        "warn": "ansiyellow",
        "bad": "ansired bold",
        "ask": "bold",
        "dim": "",
    }
)
_NAMED_KEYS = {
    "up": "up",
    "down": "down",
    "pageup": "pageup",
    "pagedown": "pagedown",
    "home": "home",
    "end": "end",
    "enter": "enter",
    "escape": "escape",
    "backspace": "backspace",
    "c-c": "c-c",
}


class Terminal:
    """Shows a state. `perform` does what a key asked for, one thing at a time: keys that ask meanwhile do nothing."""

    def __init__(
        self,
        state: TopState,
        controls: Controls,
        perform: Callable[[Action], Coroutine[Any, Any, None]],
    ) -> None:
        self._state = state
        self._controls = controls
        self._perform = perform
        self._performing: asyncio.Task[None] | None = None
        self._app: Application[None] = Application(
            layout=Layout(Window(FormattedTextControl(self._text, show_cursor=False), always_hide_cursor=True)),
            key_bindings=self._bindings(),
            style=_STYLE,
            full_screen=True,
            refresh_interval=_REDRAW_SECONDS,
        )
        self._app.ttimeoutlen = 0.1  # how long an escape may be the beginning of another key

    async def run(self, source: Coroutine[Any, Any, None]) -> None:
        """Show until a key ends it, or what asks the scheduler fails: raises what that raises."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._exit)  # or the terminal stays as it was for this screen
        asking = asyncio.create_task(source)
        showing = asyncio.create_task(self._app.run_async(handle_sigint=False))
        try:
            await asyncio.wait((asking, showing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            self._exit()
            for task in (asking, self._performing):
                if task is not None:
                    task.cancel()
            await asyncio.gather(asking, showing, *filter(None, [self._performing]), return_exceptions=True)
        for task in (asking, showing):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _exit(self) -> None:
        if self._app.is_running and not self._app.is_done:
            self._app.exit()

    def _text(self) -> StyleAndTextTuples:
        size = self._app.output.get_size()
        lines = draw(self._state, self._controls, size.columns, size.rows, time.monotonic())
        return [fragment for line in lines for fragment in (*_fragments(line), ("", "\n"))][:-1]

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        @bindings.add("<any>")
        def _(event: KeyPressEvent) -> None:
            self._press(event.data)

        for name in _NAMED_KEYS:
            bindings.add(name, eager=name == "escape")(self._named(name))
        return bindings

    def _named(self, name: str) -> Callable[[KeyPressEvent], None]:
        return lambda _: self._press(name)

    def _press(self, key: str) -> None:
        action = self._controls.press(key, self._state.overview)
        if isinstance(action, Quit):
            self._exit()
        elif action is not None and (self._performing is None or self._performing.done()):
            self._performing = asyncio.create_task(self._done(action))

    async def _done(self, action: Action) -> None:
        await self._perform(action)
        self._app.invalidate()


def _fragments(line: Line) -> StyleAndTextTuples:
    return [(f"class:{part.style}" if part.style else "", part.text) for part in line]
