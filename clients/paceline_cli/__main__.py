"""Where the `paceline` command starts."""

import os
import sys

from paceline.process.command import open_standard_files


def main() -> None:
    """Run the command line. A failure is one line and an exit code, never a traceback."""
    open_standard_files()
    try:
        import prompt_toolkit  # noqa: F401  first a look whether they are there
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the paceline command needs {error.name}: in the checkout, pip install ./protos ./clients '.[cli]'"
        )

    from paceline_cli.app import app
    from paceline_cli.config import quieten_grpc, wants_traceback
    from paceline_cli.output import abandon_stdout, accept_any_text

    quieten_grpc()
    accept_any_text()
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # as `failures` has it; of help, for one
            abandon_stdout()
            sys.exit(128 + 13)
        raise
    except OSError as error:
        if wants_traceback():
            raise
        # Such as a full disk under stdout: nothing that this program could have done better.
        abandon_stdout()
        print(f"error: input or output failed: {error.strerror or error}", file=sys.stderr)
        sys.exit(os.EX_IOERR)
    except Exception as error:
        if wants_traceback():
            raise
        print(
            f"error: unexpected {type(error).__name__}: {error} (this is a bug; PACELINE_DEBUG=1 shows where)",
            file=sys.stderr,
        )
        sys.exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
