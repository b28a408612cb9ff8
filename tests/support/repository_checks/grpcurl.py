"""`grpcurl` as READMEs use it, answered by `buf curl`, which comes from PyPI.

Knows `-plaintext`, `-d`, `list`, `describe` and calls by reflection; refuses any other option.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from repository_checks.programs import BIN, run

BUF_CURL = ("curl", "--protocol", "grpc", "--http2-prior-knowledge")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; an unknown option ends the program with status 2."""
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", dest="data")
    parser.add_argument("address")
    parser.add_argument("verb_or_method")
    parser.add_argument("symbol", nargs="?", default="")
    return parser.parse_args(arguments)


def list_names(address: str, service: str) -> str:
    """The services of a server, or the methods of one service, a line each."""
    listing = "--list-methods" if service else "--list-services"
    result = run("buf", *BUF_CURL, listing, f"http://{address}")
    if result.returncode:
        sys.exit(result.stdout)
    names = [line for line in result.stdout.splitlines() if line.startswith(f"{service}/" if service else "")]
    return "\n".join(names) or sys.exit(f"the server has no service {service}")


def describe(address: str, symbol: str) -> str:
    """The file that defines a symbol, in proto syntax as far as Python prints it. `buf curl` has no counterpart."""
    # Only this verb needs gRPC, and only where a system runs anyway.
    import grpc
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        file = pool.FindFileContainingSymbol(symbol)
        return f"{symbol} is in {file.name}, package {file.package}"


def main() -> None:
    """Answer one command line; a call's output streams as it arrives."""
    arguments = parse(sys.argv[1:])
    match arguments.verb_or_method:
        case "list":
            print(list_names(arguments.address, arguments.symbol))
        case "describe":
            print(describe(arguments.address, arguments.symbol))
        case method:
            data = ("-d", arguments.data) if arguments.data is not None else ()
            os.execv(BIN / "buf", ["buf", *BUF_CURL, *data, f"http://{arguments.address}/{method}"])  # noqa: S606


if __name__ == "__main__":
    main()
