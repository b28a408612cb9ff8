"""Processes of an older revision serve together with those of this one: no stream fails, or goes on as another one.

A folder is read in two ways by them, so a prompt has one or two forms. Each stream must be, to its end and whoever
resumes it, what it is without faults where all executors are of one revision.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.numpy import save_file
from tokenizers import processors

from edge_rig.tokenizers import CHAT_TEMPLATE, sentence_piece_tokenizer
from paceline_cli.chaos.comparison import StreamComparison
from paceline_cli.chaos.load import undisturbed_results
from paceline_cli.chaos.requests import chaos_requests
from paceline_cli.chaos.system import LocalSystem
from paceline_cli.chaos.waiting import until
from paceline_cli.supervisor.programs import Deployment, free_ports
from paceline_client.async_client import AsyncClient
from paceline_client.config import Retry
from paceline_client.errors import PacelineError
from paceline_client.requests import Message
from paceline_client.tools import Tool
from random_models import TINY_CONFIG, RandomCheckpoint, llama_fields

ROOT = Path(__file__).parents[2]
FORM = ("-G", "^TOKENIZER_FORM = ", "--", "protos/paceline/plan/hashes.py")
PACKAGES = ("protos", "scheduler", "executor", "kernels", "clients")
NUM_STREAMS, NUM_KILLS = 16, 10
OLD, NEW = "old", "new"
# They may end at an end token, too.
REQUESTS = [
    replace(each, stopping=replace(each.stopping, ignore_eos=False))
    for each in chaos_requests(48, has_forms=False, has_tools=False)
]


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.fixture(scope="module")
def older(request, tmp_path_factory):
    """The PYTHONPATH of the revision that is asked for, or of the one before the form last changed."""
    asked = request.config.getoption("--revision") or f"{git('log', '-1', '--format=%H', *FORM) or 'HEAD'}^"
    folder = tmp_path_factory.mktemp("older")
    if not git("rev-parse", "--verify", f"{asked}^{{commit}}"):
        pytest.skip(f"there is no revision {asked} here: it takes a clone with its history")
    git("archive", "--output", str(folder / "older.tar"), asked, *PACKAGES)
    shutil.unpack_archive(folder / "older.tar", folder, filter="data")
    return ":".join(str(folder / package) for package in PACKAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """It says much where only later forms look: its begin token, its end tokens, what a template calls them, how
    outputs are marked, which template is that of chats with tools.
    """
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    sizes = {"vocab_size": 400, "num_layers": 8, "max_model_len": 2048, "tie_word_embeddings": False}
    checkpoint = RandomCheckpoint(replace(TINY_CONFIG, **sizes))
    tokenizer = sentence_piece_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    templates = [
        {"name": "default", "template": plain},
        {"name": "tool_use", "template": plain.replace(" | tojson", "")},
    ]
    named = {"tokenizer_class": "LlamaTokenizer", "chat_template": templates}
    named["response_template"] = {"start_anchor": "<|im_start|>assistant", "fields": {"content": {}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    fields = llama_fields(checkpoint.config) | {"eos_token_id": [2, *range(300, 304)]}
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = checkpoint.config.tensor_shapes()
    save_file({name: checkpoint.tensor(name) for name in shapes}, folder / "model.safetensors")
    return folder


class Silent:
    def on_event(self, event):
        """Processes end all the time here."""


def mixed_system(model, schedulers, executors, older):
    """A system whose processes have these revisions, in order."""
    deployment = Deployment(
        model=str(model),
        host="127.0.0.1",
        ports=free_ports(len(executors)),
        shutdown_timeout_seconds=10,
        with_standby=len(schedulers) > 1,
    )
    names = (*deployment.scheduler_names, *deployment.executor_names)
    revisions = dict(zip(names, (*schedulers, *executors), strict=True))
    system = LocalSystem(deployment, (), Silent(), random.Random(0))  # noqa: S311  no secret
    prepared = system._prepared

    def of_its_revision(program):
        environment = (("PYTHONPATH", older),) if revisions[program.name] == OLD else ()
        return replace(prepared(program), environment=environment)

    system._prepared = of_its_revision
    return system


class Streams:
    """So many at a time, each compared with all that it may be."""

    def __init__(self, client, name, forms):
        self.client, self.name, self.forms = client, name, forms
        self.requests = itertools.cycle(REQUESTS)
        self.seen = Counter()
        self.faults = []
        self.last_delta = {}
        self.is_stopping = False

    async def run(self):
        await asyncio.gather(*(self._keep_one_running(number) for number in range(NUM_STREAMS)))

    async def _keep_one_running(self, number):
        while not self.is_stopping:
            try:
                await self._run_one(next(self.requests), number)
            except PacelineError as error:
                self.faults.append(error)

    async def _run_one(self, request, number):
        found = {form: StreamComparison(request.name, expected[request.name]) for form, expected in self.forms.items()}
        wrong = {}
        async with request.stream(self.client, self.name) as stream:
            async for delta in stream:
                self.last_delta[number] = asyncio.get_running_loop().time()
                wrong |= {form: fault for form in found if (fault := found[form].take(delta))}
            wrong |= {form: fault for form in found if (fault := found[form].conclude(stream.result))}
        self.seen["streams"] += 1
        self.seen["placed again"] += any(each.attempt > 1 for each in stream.result.completions)
        self.seen.update(form for form in found if form not in wrong)
        if len(wrong) == len(found):
            self.faults.append({form: fault.first for form, fault in wrong.items()})

    async def all_go_on(self):
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(120):
            await until(lambda: all(self.last_delta.get(number, 0) > began for number in range(NUM_STREAMS)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forms(model, older):
    """What a request gets without faults, by the revisions of the scheduler and the executor that it has."""
    found, shown = {}, {}
    for scheduler, executor in itertools.product((OLD, NEW), repeat=2):
        async with mixed_system(model, (scheduler,), (executor,), older) as system:
            served, *_ = await system.ready()
            async with AsyncClient(system.target) as client:
                found[scheduler, executor] = await undisturbed_results(client, REQUESTS, served.name)
                if scheduler == NEW:  # others may know no tools
                    shown[executor] = await client.tokenize(messages=[Message("user", "hi")], tools=[Tool("f")])
    by_form = [(shown[executor], [each.text for each in found[NEW, executor].values()]) for executor in (OLD, NEW)]
    assert by_form[0] != by_form[1], "the folder does not show how the forms differ: let it"
    return found


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("schedulers", "executors"),
    [
        ((OLD,), (NEW, NEW)),
        ((NEW,), (OLD, OLD)),
        ((NEW,), (OLD, NEW)),
        ((OLD,), (OLD, NEW)),
        ((OLD, NEW), (OLD, NEW)),
    ],
    ids=lambda revisions: "-".join(revisions),
)
async def test_streams_go_on_as_they_began_on_executors_of_another_revision(
    schedulers, executors, model, forms, older, capsys
):
    chosen = {pair: forms[pair] for pair in itertools.product(dict.fromkeys(schedulers), dict.fromkeys(executors))}
    async with mixed_system(model, schedulers, executors, older) as system:
        await until(lambda: system._roll.is_complete)
        async with AsyncClient(system.target, retry=Retry(max_outage_seconds=300.0)) as client:
            served, *_ = await client.wait_until_ready(60)
            streams = Streams(client, served.name, chosen)
            running = asyncio.create_task(streams.run())
            for victim in itertools.islice(itertools.cycle(system.deployment.executor_names), NUM_KILLS):
                await streams.all_go_on()
                victims = [victim] if len(schedulers) == 1 else [victim, await system.active_scheduler()]
                for name in victims:
                    os.kill(await system.process_id(name), signal.SIGKILL)
                await streams.all_go_on()
                await until(lambda: system._roll.is_complete)
            streams.is_stopping = True
            await running
    with capsys.disabled():
        print(f"\n{schedulers} {executors}: {dict(streams.seen)}, {len(streams.faults)} failed or changed")
    assert not streams.faults, streams.faults[0]
    assert streams.seen["placed again"] >= NUM_KILLS
