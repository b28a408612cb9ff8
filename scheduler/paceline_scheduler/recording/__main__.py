"""What `paceline replay` and `paceline explain FILE` run: `python -m paceline_scheduler.recording --help`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.process.command import open_standard_files
from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording.replay import Recording, ReplayResult, follow, read_recording, replay
from paceline_scheduler.recording.story import Requests, Story

_OK, _DIFFERENT, _USAGE, _READER_GONE = 0, 1, 2, 141


def main() -> int:
    """Return the exit code: 0, 1 where a plan differs, 2 for a file that cannot be read or no such request."""
    open_standard_files()
    parser = argparse.ArgumentParser(prog="paceline", description="Look into a recording of a scheduler.")
    commands = parser.add_subparsers(dest="command", required=True)
    replaying = commands.add_parser("replay", help="repeat it, and compare every plan")
    replaying.add_argument("files", type=Path, nargs="+", metavar="file")
    replaying.add_argument("--policy", help="other settings of the scheduler to try: JSON, or a file with it")
    replaying.add_argument("--plot", type=Path, help="SVG file for a picture of both, with --policy")
    explaining = commands.add_parser("explain", help="tell a request's story")
    explaining.add_argument("files", type=Path, nargs="+", metavar="file")
    explaining.add_argument("--request")
    options = parser.parse_args()
    try:
        if options.command == "explain":
            return _list(options.files) if options.request is None else _explain(options.files, options.request)
        if options.policy is not None:
            return _try(options.files, options.policy, options.plot)
        return max(_replay(read_recording(file), file) for file in options.files)
    except RecordingError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain as it ends
        return _READER_GONE


def _replay(recording: Recording, file: Path) -> int:
    requests = Requests()
    done = replay(recording, [requests])
    span_s = done.last_s - (done.first_s or done.last_s)
    print(f"file        {file}, number {recording.header.number}, {recording.header.token_form.name.lower()}")
    print(f"version     {recording.header.program_version}, scheduler {recording.header.scheduler_id}")
    print(f"time        {span_s:.3f} s")
    print(f"events      {done.num_events}, {done.num_refusals} of them refused")
    print(f"requests    {len(requests.found)}")
    print(f"plans       {done.num_plans}")
    return _told(done)


def _told(done: ReplayResult) -> int:
    if done.difference is None:
        print("every plan was reproduced")
        return _OK
    found = done.difference
    where = f"step {found.step_id}" if found.step_id is not None else "an event"
    executor = f" of {found.address}" if found.address else ""
    after_s = found.now - (done.first_s or found.now)
    print(f"{where}{executor}, {after_s:.3f} s after the beginning, is the first that differs:")
    for sentence in found.sentences:
        print(f"  {sentence}")
    return _DIFFERENT


def _explain(files: Sequence[Path], wanted: str) -> int:
    story = Story(wanted)
    _, done = follow(map(read_recording, files), story)
    for file, each in zip(files, done, strict=True):
        if each.difference is not None:
            print(f"the repetition of {file} differs from the recording; what follows lacks the rest of it")
    match story.request_ids():
        case []:
            raise RecordingError(f"no request is called {wanted!r} or begins so; without a name they are listed")
        case [request_id]:
            for key, lines in story.lines(request_id):
                print(f"{key.request_id}" + (f" completion {key.index}" if key.index else "") + _of(key.tenant))
                for seconds, sentence in lines:
                    print(f"{seconds:10.3f} s  {sentence}")
        case several:
            raise RecordingError(f"{wanted!r} begins {len(several)} ids: {', '.join(several[:10])}")
    return _OK


def _list(files: Sequence[Path]) -> int:
    requests = Requests()
    first_s, done = follow(map(read_recording, files), requests)
    print(f"{'at s':>9} {'prompt':>7} {'output':>7} {'first s':>8} {'whole s':>8}  {'end':<12} request")
    for listed in requests.found.values():
        ended = listed.ended
        first = "" if ended is None or ended.first_token_s is None else f"{ended.first_token_s:.3f}"
        whole = "" if ended is None or ended.times is None else f"{ended.times.total_s:.3f}"
        num_output = "" if ended is None else str(ended.num_output_tokens)
        name = f"{listed.key.request_id}" + (f" completion {listed.key.index}" if listed.key.index else "")
        print(
            f"{listed.first_s - first_s:9.3f} {listed.num_prompt_tokens:7} {num_output:>7} {first:>8} {whole:>8}  "
            f"{listed.outcome:<12} {name}{_of(listed.key.tenant)}"
        )
    return max(_OK if each.difference is None else _told(each) for each in done)


def _of(tenant: str) -> str:
    return f" of {tenant}" if tenant else ""


def _try(files: Sequence[Path], policy: str, plot: Path | None) -> int:
    from paceline_scheduler.recording.what_if import compare  # which only this needs

    if len(files) > 1:
        raise RecordingError("--policy tries one file; name the one you mean")
    print(compare(read_recording(files[0]), policy, plot))
    return _OK


if __name__ == "__main__":
    sys.exit(main())
