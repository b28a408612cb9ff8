"""The rendered pods with certificates and tokens: they find each other, and the test pod gets its token of text."""

import pytest

from both_sides import certificates
from chart_checks.cluster import Cluster
from chart_checks.helm import CHART, of_kind, render
from chart_checks.pods import no_pods_left
from repository_checks.programs import run

VALUES = {
    "tls": {"source": "certManager", "certManager": {"issuerRef": {"name": "internal"}}},
    "scheduler.preStopSeconds": 0,
    "standby.enabled": False,
    "pools.nothing.replicas": 1,
}
ACCESS_DENIED = 77
TOKENS = {"auth": {"tokens": {"secretName": "tokens"}, "testToken": {"secretName": "test-token"}}}


def issue(cluster):
    """Do what cert-manager does; servers also have the addresses that stand for their names here."""
    authority = certificates.Authority()
    services = {"rel-paceline-scheduler": "rel-paceline", "rel-paceline-executor": "rel-paceline-executors"}
    for found in of_kind(cluster.objects, "Certificate"):
        service = services.get(found["metadata"]["name"])
        names = (*found["spec"].get("dnsNames", ()), *(cluster.addresses_of(service) if service else ()), "nobody")
        authority.mount(cluster.secrets / found["spec"]["secretName"], *found["spec"]["uris"], names=names)
    return authority


@pytest.mark.slow  # starts the pods as processes
@pytest.mark.parametrize("values", [{}, TOKENS], ids=["certificates", "tokens"])
async def test_pods_with_certificates_serve_whom_they_should(tmp_path, values):
    """The test pod is a client; a certificate of nobody's role would not do, nor a token that is not in the file."""
    async with no_pods_left() as pods:
        cluster = Cluster(tmp_path / "pods", pods)
        cluster.plan(render(CHART / "ci" / "without-a-model.yaml", VALUES | values))
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
