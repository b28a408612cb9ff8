"""The subcommands of `paceline`, one module each: options, output and exit codes."""
