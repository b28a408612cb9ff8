"""The rendered commands, variables, probes and hooks at work, as processes: installed, upgraded under load, removed.

Certificates and tokens are those that the chart mounts.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest

from both_sides import certificates
from chart_checks.cluster import Cluster
from chart_checks.helm import CHART, of_kind, render
from chart_checks.pods import Pod, PodError, addresses, expanded, no_pods_left
from executor_rig.hash_runner import continuation
from paceline.bytes_tokenizer import PRINTABLE
from paceline_client import AsyncClient, Sampling, Stopping
from paceline_kernels.compiler import jit
from random_models import default_model_path
from repository_checks.programs import run

MINIMAL = CHART / "ci" / "minimal.yaml"
NO_MODEL = CHART / "ci" / "without-a-model.yaml"
WITH_TLS = {
    "tls": {"source": "certManager", "certManager": {"issuerRef": {"name": "internal"}}},
    "scheduler.preStopSeconds": 0,
    "standby.enabled": False,
    "pools.nothing.replicas": 1,
}
WITH_TOKENS = {"auth": {"tokens": {"secretName": "tokens"}, "testToken": {"secretName": "test-token"}}}
ACCESS_DENIED = 77
NUM_STREAMS = 32
NUM_TOKENS = 100
processes = pytest.mark.slow  # each pod is one


@pytest.fixture
async def cluster(tmp_path):
    """An empty one, with nothing left of it in the end."""
    async with no_pods_left() as pods:
        yield Cluster(tmp_path / "pods", pods)


@pytest.fixture
def without_a_model(tmp_path):
    """Values with which executors need no model, and take 10 ms for a step."""
    (tmp_path / "times.json").write_text(json.dumps({"points": [{"num_tokens": 1, "duration_us": 10_000}]}))
    return {
        "pools.nothing.args": ["--runner=simulated:../../times.json"],  # of where a pod runs
        "scheduler.preStopSeconds": 1,
    }


@pytest.fixture
def warm_cache(tmp_path):
    """The cache volume of an executor that has run before: its model and kernels, which other tests have fetched."""
    volume = tmp_path / "pods" / "rel-paceline-small-0" / "cache"
    volume.mkdir(parents=True)
    (volume / "models").symlink_to(default_model_path(os.environ).parents[1])
    (volume / "kernels").symlink_to(Path(jit._config.CACHE_DIR).parent)


async def stream(client, number):
    """The tokens of one request, and those it must get."""
    prompt = [number % 7, 5, 9] * (1 + number % 20)
    result = await client.generate(
        token_ids=prompt, sampling=Sampling(seed=number), stopping=Stopping(max_tokens=NUM_TOKENS)
    )
    return list(result.token_ids), continuation(prompt, NUM_TOKENS, PRINTABLE, number)


async def stream_until(client, ended, first):
    """One request after the other; returns what each got and must get."""
    streams = []
    while not ended.is_set():
        streams.append(await stream(client, first + NUM_STREAMS * len(streams)))
    return streams


@processes
async def test_no_stream_notices_an_upgrade(cluster, without_a_model):
    new_schedulers = without_a_model | {"scheduler.image": "paceline-scheduler:0.2.0"}
    new_executors = new_schedulers | {"pools.nothing.image": "paceline-executor-cpu:0.2.0"}
    await cluster.install(render(NO_MODEL, without_a_model))
    ended = asyncio.Event()
    async with AsyncClient(cluster.targets("rel-paceline")) as client:
        load = [asyncio.create_task(stream_until(client, ended, number)) for number in range(NUM_STREAMS)]
        for values, num_restarted in ((new_schedulers, 2), (new_executors, 4)):
            await cluster.upgrade(render(NO_MODEL, values))
            assert len(cluster.exit_codes) == num_restarted
        ended.set()
        streams = [one for each in await asyncio.gather(*load) for one in each]
    (test,) = await cluster.test()
    await cluster.uninstall()

    print(f"{len(streams)} streams of {NUM_TOKENS} tokens, {len(cluster.exit_codes)} processes ended")
    assert len(streams) > NUM_STREAMS
    assert [(got, wanted) for got, wanted in streams if got != wanted] == []
    assert test.log.strip()
    assert set(cluster.exit_codes.values()) == {0}


@processes
async def test_a_single_scheduler_is_replaced_before_it_ends(cluster, without_a_model):
    without_standby = without_a_model | {"standby.enabled": False}
    await cluster.install(render(NO_MODEL, without_standby))
    async with AsyncClient(cluster.targets("rel-paceline")) as client:
        load = [asyncio.create_task(stream(client, number)) for number in range(NUM_STREAMS)]
        await cluster.upgrade(render(NO_MODEL, without_standby | {"scheduler.image": "paceline-scheduler:0.2.0"}))
        assert all(got == wanted for got, wanted in await asyncio.gather(*load))
    assert set(cluster.exit_codes.values()) == {0}


@processes
async def test_helm_test_has_the_model_generate_a_token(cluster, warm_cache):
    objects = render(MINIMAL, {"standby.enabled": False, "scheduler.preStopSeconds": 0})
    await cluster.install(objects)
    (test,) = await cluster.test()
    await cluster.uninstall()
    assert set(cluster.exit_codes.values()) == {0}
    assert test.log.strip()


def issue(cluster):
    """Do what cert-manager does; servers also have the addresses that stand for their names here."""
    authority = certificates.Authority()
    services = {"rel-paceline-scheduler": "rel-paceline", "rel-paceline-executor": "rel-paceline-executors"}
    for found in of_kind(cluster.objects, "Certificate"):
        service = services.get(found["metadata"]["name"])
        names = (*found["spec"].get("dnsNames", ()), *(cluster.addresses_of(service) if service else ()), "nobody")
        authority.mount(cluster.secrets / found["spec"]["secretName"], *found["spec"]["uris"], names=names)
    return authority


@processes
@pytest.mark.parametrize("values", [{}, WITH_TOKENS], ids=["certificates", "tokens"])
async def test_pods_with_certificates_serve_whom_they_should(cluster, values):
    """The test pod is a client; a certificate of nobody's role would not do, nor a token that is not in the file."""
    cluster.plan(render(NO_MODEL, WITH_TLS | values))
    authority = issue(cluster)
    for folder in ("tokens", "test-token"):
        (cluster.secrets / folder).mkdir()
    made = run("paceline", "token", "--tenant", "blue", "--tokens", cluster.secrets / "tokens" / "tokens")
    (cluster.secrets / "test-token" / "token").write_text(made.stdout.strip())
    await cluster.install(cluster.objects)
    (test,) = await cluster.test()
    assert cluster.exit_codes[test.name] == 0, test.log
    assert test.log.strip()
    (cluster.secrets / "test-token" / "token").write_text("unknown")
    authority.mount(cluster.secrets / "rel-paceline-client-tls", "paceline://executor", names=("nobody",))
    await cluster.test()
    assert cluster.exit_codes[test.name] == ACCESS_DENIED
    await cluster.uninstall()


@processes
async def test_a_pod_that_ends_is_reported_with_what_it_said(cluster, without_a_model):
    """Where a cluster would start it again and again."""
    objects = render(NO_MODEL, without_a_model | {"pools.nothing.args": ["--runner=simulated:none"]})
    (pods,) = of_kind(objects, "StatefulSet")
    pod = Pod("a", pods, next(addresses()), cluster.folder / "a", {})
    cluster.pods.append(pod)
    await pod.start()
    with pytest.raises(PodError, match=r"a ended with 2(.|\n)*check --runner simulated:FILE"):
        await pod.until_ready()


def test_variables_are_expanded_as_kubernetes_does():
    variables = {"POD_IP": "10.0.0.1", "A.b-c": "$(POD_IP)"}
    assert expanded("$(POD_IP):1,$(POD_IP)", variables) == "10.0.0.1:1,10.0.0.1"
    assert expanded("$(OTHER) $$(POD_IP) $POD_IP $(A.b-c)", variables) == "$(OTHER) $(POD_IP) $POD_IP $(POD_IP)"
