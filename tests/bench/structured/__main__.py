"""`python -m structured [HOST:PORT] --schemas PATH … [--count 1000]`, `--cost` or `--hostile`, with `paceline up`."""

import argparse
import asyncio
from pathlib import Path

from structured import cost, hostile, validity


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure outputs that are held to a form.")
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051", help="a scheduler (default 127.0.0.1:50051)")
    parser.add_argument("--schemas", type=Path, nargs="+", default=[], help='.jsonl of {"name", "schema"}, or folders')
    parser.add_argument("--count", type=int, default=1000, help="schemas to send at most (default 1000)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each output (default 1024)")
    parser.add_argument("--cost", action="store_true", help="measure times instead")
    parser.add_argument("--hostile", action="store_true", help="measure what hostile forms cost others instead")
    arguments = parser.parse_args()
    if arguments.cost or arguments.hostile:
        asyncio.run((cost if arguments.cost else hostile).measure(arguments.target))
        return
    schemas = validity.read_schemas(arguments.schemas, arguments.count)
    for temperature in (0.0, 1.0):
        outcome = asyncio.run(validity.measure(arguments.target, schemas, temperature, arguments.max_tokens))
        print(f"temperature {temperature:g}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
