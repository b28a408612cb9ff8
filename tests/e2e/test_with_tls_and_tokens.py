"""The whole system as strangers may reach it: processes with certificates and tokens, both renewed while it serves."""

import asyncio
import hashlib
import json
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from both_sides.calls import DENIED, UNAUTHENTICATED, message_about, methods_of, outcome, tenant_fields
from both_sides.certificates import Authority
from executor_rig.hash_runner import continuation
from paceline.bytes_tokenizer import PRINTABLE
from paceline.v1 import admin_pb2, inference_pb2
from paceline_client import AccessDeniedError, AsyncClient, OverloadedError, Retry, Sampling, Stopping, Tls
from repository_checks.programs import BIN, run
from service_processes.measured import event, module_process, scheduler_of, simulated_executor

NUM_STREAMS = 4
NUM_TOKENS = 200
GENEROUS_S = 300


@dataclass
class System:
    """Where everything listens, and what callers show; all of it can be renewed."""

    authority: Authority
    folder: Path
    events: dict
    tokens: Path
    mounts: dict
    executor: str = ""

    @property
    def api(self):
        return f"localhost:{self.events['port']}"

    @property
    def admin(self):
        return f"localhost:{self.events['admin_port']}"

    def renew_certificates(self):
        """Give everybody new ones, as cert-manager does."""
        for folder, uris in self.mounts.items():
            self.authority.mount(folder, *uris)

    def new_token(self, tenant, **more):
        token = secrets.token_hex(32)
        fields = {"hash": f"sha256:{hashlib.sha256(token.encode()).hexdigest()}", "tenant": tenant, **more}
        with self.tokens.open("a") as file:
            file.write(json.dumps(fields) + "\n")
        return token

    def revoke_first_token(self):
        _, *rest = self.tokens.read_text().splitlines(keepends=True)
        replace_text(self.tokens, "".join(rest))

    def channel(self, address, folder=None):
        """A connection, with a certificate of one's own if there is a folder."""
        roots = (self.folder / "client" / "ca.crt").read_bytes()
        own = (None, None) if folder is None else [(folder / name).read_bytes() for name in ("tls.key", "tls.crt")]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots, *own))


@pytest.fixture
async def system(tmp_path):
    """A scheduler that found its executor by a name, whose certificate has that name only."""
    authority, tokens = Authority(), tmp_path / "tokens.jsonl"
    tokens.touch()
    mounts = {
        tmp_path / "executor": ("paceline://executor",),
        tmp_path / "scheduler": ("paceline://scheduler",),
        tmp_path / "operator": ("paceline://operator",),
        tmp_path / "client": (),
    }
    system = System(authority, tmp_path, {}, tokens, mounts)
    system.renew_certificates()
    authority.mount(tmp_path / "executor", "paceline://executor", names=("localhost",))
    async with simulated_executor("--tls-dir", str(tmp_path / "executor"), step_ms=1.0) as address:
        options = ("--tls-dir", str(tmp_path / "scheduler"), "--tokens", str(tokens))
        async with scheduler_of(f"dns:///localhost:{address.rpartition(':')[2]}", *options) as (_, ready):
            system.events, system.executor = ready, address
            yield system


async def test_every_call_of_both_ports_is_refused_to_strangers(system):
    token = system.new_token("blue")
    client = system.folder / "client"
    async with system.channel(system.api) as public, system.channel(system.admin, client) as admin:
        await until_known(public, token)
        for method in methods_of(inference_pb2.DESCRIPTOR):
            assert await outcome(public, method) == UNAUTHENTICATED, method.name
        for method in methods_of(admin_pb2.DESCRIPTOR):
            assert await outcome(admin, method) == UNAUTHENTICATED, method.name
            assert await outcome(admin, method, token=token) == DENIED, method.name
        names = await reflected(public)
        assert "paceline.v1.InferenceService" in names
    async with system.channel(system.admin) as admin:
        for method in methods_of(admin_pb2.DESCRIPTOR):
            assert (await outcome(admin, method))[0] is grpc.StatusCode.UNAVAILABLE, method.name
    async with system.channel(system.admin, system.folder / "operator") as admin:
        (method,) = [method for method in methods_of(admin_pb2.DESCRIPTOR) if method.name == "ListExecutors"]
        assert await outcome(admin, method) == (grpc.StatusCode.OK, "")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.events['health_port']}") as probes:
        check = health_pb2.HealthCheckRequest(service="paceline.v1.InferenceService")
        assert (await health_pb2_grpc.HealthStub(probes).Check(check)).status == health_pb2.HealthCheckResponse.SERVING


async def test_without_tokens_certificates_say_who_calls(tmp_path):
    authority = Authority()
    folder = authority.mount(tmp_path / "scheduler", "paceline://scheduler")
    system = System(authority, tmp_path, {}, tmp_path / "none", {})
    ports = [part for name in ("port", "admin-port", "health-port", "metrics-port") for part in (f"--{name}", "0")]
    options = ("--executors", "localhost:1", "--tls-dir", str(folder))
    for name, *uris in (
        ("client",),
        ("executor", "paceline://executor"),
        ("blue", "paceline://client/blue"),
        ("operator", "paceline://operator"),
    ):
        authority.mount(tmp_path / name, *uris)
    async with module_process("paceline_scheduler", *ports, *options) as process:
        system.events = await event(process, "listening")
        for address, file in ((system.api, inference_pb2), (system.admin, admin_pb2)):
            methods = methods_of(file.DESCRIPTOR)
            async with system.channel(address) as channel:
                for method in methods:
                    assert (await outcome(channel, method))[0] is grpc.StatusCode.UNAVAILABLE, method.name
            for name, refusal in (("client", UNAUTHENTICATED), ("executor", DENIED)):
                async with system.channel(address, tmp_path / name) as channel:
                    for method in methods:
                        assert await outcome(channel, method) == refusal, (method.name, name)
        async with system.channel(system.admin, tmp_path / "blue") as channel:
            for method in methods_of(admin_pb2.DESCRIPTOR):
                assert await outcome(channel, method) == DENIED, method.name
        async with system.channel(system.api, tmp_path / "blue") as channel:
            for method in methods_of(inference_pb2.DESCRIPTOR):
                for path in tenant_fields(method):
                    foreign, own = (message_about(method, path, tenant) for tenant in ("red", "blue"))
                    assert await outcome(channel, method, message=foreign) == DENIED, method.name
                    assert await outcome(channel, method, message=own) != DENIED, method.name
        async with system.channel(system.admin, tmp_path / "operator") as channel:
            (method,) = [method for method in methods_of(admin_pb2.DESCRIPTOR) if method.name == "GetLimits"]
            assert await outcome(channel, method) == (grpc.StatusCode.OK, "")


def replace_text(file, text):
    """All at once, as Kubernetes replaces a mounted secret: no reader finds half of it."""
    replacement = file.with_suffix(".new")
    replacement.write_text(text)
    replacement.replace(file)


async def until_known(channel, token):
    """Wait until the scheduler has read its file again."""
    (method,) = [method for method in methods_of(inference_pb2.DESCRIPTOR) if method.name == "ListModels"]
    async with asyncio.timeout(20):
        while await outcome(channel, method, token=token) != (grpc.StatusCode.OK, ""):
            await asyncio.sleep(0.05)


async def presented_by(address):
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def reflected(channel):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    answer = await answers.read()
    answers.cancel()
    return [service.name for service in answer.list_services_response.service]


async def test_the_command_shows_a_token_and_believes_a_certificate(system, monkeypatch):
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    making = ("paceline", "token", "--tenant", "blue", "--tokens", str(system.tokens))
    token = (await asyncio.to_thread(run, *making)).stdout.strip()
    async with system.channel(system.api) as channel:
        await until_known(channel, token)
    command = ("paceline", "generate", "Hello", "--max-tokens", "5", "--seed", "1", "--target", system.api)
    command += ("--tls-dir", str(system.folder / "client"))
    refused = await asyncio.to_thread(run, *command)
    assert refused.returncode == 77
    file = system.folder / "token"
    file.write_text(token + "\n")
    by_file = await asyncio.to_thread(run, *command, "--token-file", str(file))
    monkeypatch.setenv("PACELINE_TOKEN", token)
    by_environment = await asyncio.to_thread(run, *command)
    assert (by_file.returncode, by_environment.returncode) == (0, 0), by_file.stdout + by_environment.stdout
    assert by_file.stdout == by_environment.stdout
    assert len(by_file.stdout) == 6


async def test_up_runs_with_certificates_and_tokens(tmp_path, first_free_port):
    authority, tokens = Authority(), tmp_path / "tokens.jsonl"
    folder = authority.mount(tmp_path / "both", "paceline://scheduler")
    making = ("paceline", "token", "--tenant", "blue", "--tokens", str(tokens))
    (tmp_path / "token").write_text((await asyncio.to_thread(run, *making)).stdout)
    command = ("up", "--runner", "simulated", "--tls-dir", str(folder), "--tokens", str(tokens))
    ports = ("--port", str(first_free_port), "--executor-port", str(first_free_port + 3))
    system = await asyncio.create_subprocess_exec(BIN / "paceline", *command, *ports, stdout=asyncio.subprocess.PIPE)
    try:
        told = b""
        async with asyncio.timeout(GENEROUS_S):
            while b"Ctrl-C stops everything" not in told:
                line = await system.stdout.readline()
                assert line, told
                told += line
        (hint,) = [line for line in told.decode().splitlines() if "paceline generate" in line]
        asking = hint.split('"')[0].replace("FILE", str(tmp_path / "token")).split()
        answer = await asyncio.to_thread(run, *asking, "Hello", "--max-tokens", "5")
        assert answer.returncode == 0, answer.stderr
        stranger = await asyncio.to_thread(run, *asking[: asking.index("--token-file")], "Hello")
        assert stranger.returncode == 77
    finally:
        if system.returncode is None:
            system.terminate()
        await system.communicate()


@pytest.mark.parametrize(("num_renewals", "every_s"), [(3, 0.0), pytest.param(150, 2.0, marks=pytest.mark.soak)])
async def test_no_stream_fails_while_certificates_and_tokens_are_renewed(system, num_renewals, every_s):
    file, num_ended = system.folder / "token", 0
    file.write_text(system.new_token("blue"))
    async with system.channel(system.api) as channel:
        await until_known(channel, file.read_text())
    tls = Tls(folder=system.folder / "client")
    is_over = asyncio.Event()

    async def stream(client, number):
        nonlocal num_ended
        prompt, stopping = [number % 200, 7, 9], Stopping(max_tokens=NUM_TOKENS)
        result = await client.generate(token_ids=prompt, sampling=Sampling(seed=number), stopping=stopping)
        assert list(result.token_ids) == continuation(prompt, NUM_TOKENS, PRINTABLE, number)
        num_ended += 1

    async def keep_streaming(number):
        async with AsyncClient(system.api, tls=tls, token=file) as client:
            while not is_over.is_set():
                await stream(client, number)

    async def keep_coming(number):
        while not is_over.is_set():
            async with AsyncClient(system.api, tls=tls, token=file) as client:
                await stream(client, number)

    async def renew():
        system.renew_certificates()
        for address, owner in ((system.api, "scheduler"), (system.executor, "executor")):
            assert await presented_by(address) == (system.folder / owner / "tls.crt").read_text()
        new = system.new_token("blue")
        async with system.channel(system.api) as channel:
            await until_known(channel, new)
        replace_text(file, new)
        system.revoke_first_token()

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(keep_streaming(number) if number % 2 else keep_coming(number))
        begun = asyncio.get_running_loop().time()
        num_done = 0
        while num_done < num_renewals or num_ended <= NUM_STREAMS:
            await asyncio.gather(renew(), asyncio.sleep(every_s))
            num_done += 1
        took_s = asyncio.get_running_loop().time() - begun
        is_over.set()
    print(f"{num_ended} streams of {NUM_TOKENS} tokens, {num_done} renewals in {took_s:.0f} s")


async def test_a_tenant_beyond_its_bounds_is_refused_and_others_are_not(system):
    bounds = ("max_requests_per_minute", "max_tokens_per_minute", "max_num_streams")
    tokens = {name: system.new_token(name, limits={name: 1}) for name in bounds}
    red = system.new_token("red")
    async with system.channel(system.api) as channel:
        await until_known(channel, red)

    def client_of(token):
        return AsyncClient(
            system.api, tls=Tls(folder=system.folder / "client"), token=token, retry=Retry(max_attempts=1)
        )

    async def ask(client):
        return await client.generate("Hello", stopping=Stopping(max_tokens=2))

    async with client_of(red) as others:
        for token in tokens.values():
            async with client_of(token) as first, client_of(token) as second:
                await ask(first)
                with pytest.raises(OverloadedError) as refusal:
                    await ask(second)
                assert refusal.value.reason == "TENANT_LIMIT"
                assert refusal.value.retry_after > 0
                await ask(others)


async def test_a_client_whose_token_was_revoked_is_told_so(system):
    token = system.new_token("blue")
    async with system.channel(system.api) as channel:
        await until_known(channel, token)
    async with AsyncClient(system.api, tls=Tls(folder=system.folder / "client"), token=token) as client:
        stream = client.stream("Hello", stopping=Stopping(max_tokens=1500))
        await anext(stream)
        system.revoke_first_token()
        with pytest.raises(AccessDeniedError):
            await stream.collect()
