"""What somebody types at a terminal: lines that can be edited and recalled, and pasted texts of several lines.

Knows prompt_toolkit. Refuses to know what is done with a line.
"""

from collections.abc import Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class LineEditor:
    """Asks for one line after another. A pasted text is one line, whatever it holds; Alt-Enter begins a new one in it.

    What was typed is remembered until the program ends, and is written nowhere.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        """`commands` are completed by Tab at the beginning of a line."""
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
            prompt_continuation="",
        )

    def read(self, prompt: str) -> str:
        """The next line. EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        return self._session.prompt(prompt)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
