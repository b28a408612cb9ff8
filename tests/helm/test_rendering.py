"""What the chart renders: valid on every Kubernetes, restricted, whole, and made of options that the programs have."""

import copy
import functools
import json

import pytest
import yaml

from chart_checks.dockerfile import all_images, image_of
from chart_checks.goldens import FILES as GOLDEN_FILES
from chart_checks.goldens import golden_of
from chart_checks.helm import (
    CHART,
    PROGRAMS,
    VALUES_FILES,
    HelmError,
    containers,
    helm,
    lint,
    named,
    of_kind,
    part_of,
    pod_labels,
    pod_spec,
    render,
    selects,
    with_pods,
)
from chart_checks.pods import expanded
from chart_checks.schemas import KUBERNETES_VERSIONS, problem_of
from paceline_executor.config import parse_config
from repository_checks.knobs import options
from repository_checks.programs import run

MINIMAL = CHART / "ci" / "minimal.yaml"
GPUS = CHART / "ci" / "gpu-cert-manager.yaml"
CLAIM = CHART / "ci" / "secrets-claim.yaml"
TWO_NODES = CHART / "ci" / "two-nodes.yaml"
WITH_NODES = ("--tensor-parallel-size", "--node", "--host")
GATEWAY = CHART / "ci" / "gateway.yaml"
INIT = CHART / "ci" / "init-container.yaml"
HOST_PATH = CHART / "ci" / "host-path.yaml"
SLOW = pytest.mark.slow
COMPONENT = "app.kubernetes.io/component"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

each_file = pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)


@functools.cache
def options_of(*command):
    """What the help of a program, or of a command of it, names."""
    return options(run(*command, "--help").stdout)


def args_of(container):
    return dict(part.partition("=")[::2] for part in container["args"] if part.startswith("--"))


@pytest.mark.parametrize(
    ("file", "program"),
    [
        pytest.param(
            file, program, id=f"{file.stem}-{program}", marks=[] if (file, program) == (GPUS, "helm") else SLOW
        )
        for file in VALUES_FILES
        for program in PROGRAMS
    ],
)
def test_helm_finds_nothing_to_complain_of(file, program):
    lint(file, {}, program=program)


def test_helm_complains_of_a_worse_chart(tmp_path):
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: a\nversion: 0.1.0\n")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.yaml").write_text("{{ if }}")
    with pytest.raises(HelmError, match="missing value for if"):
        helm("lint", tmp_path)


@pytest.mark.slow
@each_file
def test_helm_3_and_4_render_the_same(file):
    assert render(file, program=PROGRAMS[0]) == render(file, program=PROGRAMS[-1])


@pytest.mark.parametrize("file", GOLDEN_FILES, ids=lambda file: file.stem)
def test_what_a_cluster_is_told_changes_where_a_reviewer_sees_it(file):
    assert render(file) == list(yaml.safe_load_all(golden_of(file).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "version",
    [
        KUBERNETES_VERSIONS[0],
        *(pytest.param(version, marks=SLOW) for version in KUBERNETES_VERSIONS[1:-1]),
        KUBERNETES_VERSIONS[-1],
    ],
)
def test_every_kubernetes_takes_it(version):
    different = {json.dumps(found): found for file in VALUES_FILES for found in render(file)}
    assert [problem for found in different.values() if (problem := problem_of(found, version))] == []


def test_a_pod_of_a_group_that_kubernetes_does_not_know_is_found():
    (group,) = of_kind(render(TWO_NODES), "LeaderWorkerSet")
    pod_spec(part_of(changed := copy.deepcopy(group), "worker"))["hostNetwrk"] = True
    assert problem_of(group, "1.37") == ""
    assert "'hostNetwrk' was unexpected" in problem_of(changed, "1.37")


@pytest.mark.parametrize("kind", ["Deployment", "Certificate"])
def test_a_field_that_kubernetes_does_not_know_is_found(kind):
    """Strictly, where a cluster would drop it without a word."""
    found = of_kind(render(GPUS), kind)[0]
    assert "'replica' was unexpected" in problem_of(found | {"spec": found["spec"] | {"replica": 2}}, "1.37")


@each_file
def test_pods_keep_the_restricted_standard(file):
    for found in with_pods(render(file)):
        spec = pod_spec(found)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for container in containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        kinds = {kind for volume in spec.get("volumes") or () for kind in volume if kind != "name"}
        allowed = {"emptyDir", "secret", "persistentVolumeClaim"} | ({"hostPath"} if file == HOST_PATH else set())
        assert kinds <= allowed


@each_file
def test_every_option_is_one_that_the_program_has(file):
    """Programs refuse others, which a cluster would show as a crash loop."""
    for found in with_pods(render(file)):
        for container in pod_spec(found)["containers"]:
            program, command = program_of(container)
            assert args_of(container).keys() <= options_of(program, *command)


def program_of(container):
    """The program that a container runs, and its command where it has several."""
    if container.get("command") == ["paceline"]:
        return "paceline", container["args"][:1]
    return image_of(container["image"]).entrypoint[0].rpartition("/")[2], []


@each_file
def test_names_that_objects_call_each_other_by_are_there(file):
    objects = render(file)
    labels = [pod_labels(found) for found in with_pods(objects)]
    for found in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet"):
        selector = found["spec"].get("podSelector") or found["spec"]["selector"]
        assert any(selects(selector.get("matchLabels", selector), pods) for pods in labels), found["metadata"]["name"]
    for found in of_kind(objects, "StatefulSet"):
        service = named(objects, "Service", found["spec"]["serviceName"])
        assert selects(service["spec"]["selector"], pod_labels(found))
    for found in with_pods(objects):
        spec = pod_spec(found)
        volumes = {volume["name"] for volume in spec.get("volumes") or ()}
        volumes |= {claim["metadata"]["name"] for claim in found["spec"].get("volumeClaimTemplates", ())}
        mounted = {mount["name"] for container in containers(spec) for mount in container.get("volumeMounts", ())}
        assert mounted == volumes


def of_component(objects, component):
    return [found for found in with_pods(objects) if pod_labels(found)[COMPONENT] == component]


@each_file
def test_a_scheduler_finds_executors_and_clients_find_schedulers(file):
    objects = render(file)
    (deployment,) = of_component(objects, "scheduler")
    (scheduler,) = pod_spec(deployment)["containers"]
    (test,) = of_kind(objects, "Pod")
    for address, port in (
        (args_of(scheduler)["--executors"], "50061"),
        *(
            (args_of(pod_spec(found)["containers"][0])["--target"], args_of(scheduler)["--port"])
            for found in (test, *of_component(objects, "gateway"))
        ),
    ):
        host, _, number = address.removeprefix("dns:///").partition(":")
        name, namespace, suffix = host.split(".")
        service = named(objects, "Service", name)
        assert (service["spec"]["clusterIP"], namespace, suffix) == ("None", "models", "svc")
        ports = {item["name"]: item["port"] for item in service["spec"]["ports"]}
        assert ports["grpc"] == int(number) == int(port)
    assert args_of(scheduler)["--advertise"] == "$(POD_IP):50051"


@each_file
def test_probes_ask_the_health_port_for_what_the_program_is(file):
    """With a budget at the start; a scheduler is not restarted because executors take long."""
    objects = render(file)
    for found in of_kind(objects, "Deployment", "StatefulSet"):
        if found in of_component(objects, "gateway"):  # it has no health port; below
            continue
        (container,) = pod_spec(found)["containers"]
        probes = {name: container[name] for name in PROBES}
        service = "paceline.v1.InferenceService" if found["kind"] == "Deployment" else "paceline.v1.ExecutorService"
        assert {probe["grpc"]["port"] for probe in probes.values()} == {int(args_of(container)["--health-port"])}
        assert probes["readinessProbe"]["grpc"]["service"] == service
        assert "service" not in probes["livenessProbe"]["grpc"]
        started = "" if found["kind"] == "Deployment" else service
        assert probes["startupProbe"]["grpc"].get("service", "") == started


@pytest.mark.parametrize(
    ("values", "scheme"), [({}, "HTTPS"), ({"tls.source": "none", "auth.tokens.secretName": ""}, "HTTP")]
)
def test_a_gateway_is_ready_while_a_scheduler_answers_and_restarted_for_itself_alone(values, scheme):
    (found,) = of_component(render(GATEWAY, values), "gateway")
    (container,) = pod_spec(found)["containers"]
    probes = {name: container[name]["httpGet"] for name in PROBES}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {("http", scheme)}
    assert {"name": "http", "containerPort": int(args_of(container)["--port"])} in container["ports"]


def test_a_gateway_is_a_client_by_its_certificate_and_a_server_by_the_name_of_its_service():
    found = named(render(GPUS, {"gateway.enabled": True}), "Certificate", "rel-paceline-gateway")["spec"]
    assert found["uris"] == ["paceline://client/gateway"]
    assert "rel-paceline-gateway.models.svc" in found["dnsNames"]
    assert found["usages"] == ["digital signature", "server auth", "client auth"]


def test_clients_outside_come_to_gateways_only_by_what_is_asked_for():
    objects = render(GATEWAY)
    (gateway,) = of_component(objects, "gateway")
    service = named(objects, "Service", "rel-paceline-gateway")["spec"]
    assert selects(service["selector"], pod_labels(gateway))
    ports = {item["name"]: item for item in service["ports"]}
    assert ports["http"]["appProtocol"] == "https"
    (ingress,) = of_kind(objects, "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "rel-paceline-gateway", "port": {"name": "http"}}
    assert ingress["spec"]["tls"] == [{"hosts": [rule["host"]], "secretName": "llm-example-com"}]
    (route,) = of_kind(objects, "HTTPRoute")
    assert route["spec"]["rules"] == [
        {"backendRefs": [{"name": "rel-paceline-gateway", "port": ports["http"]["port"]}]}
    ]
    calls = {found["metadata"]["name"]: found["spec"]["ingress"] for found in of_kind(objects, "NetworkPolicy")}
    (rule,) = calls["rel-paceline-gateway"]
    assert rule["ports"] == [{"port": 8000}]
    own = [peer.get("podSelector", {}).get("matchLabels") for peer in calls["rel-paceline-scheduler"][0]["from"]]
    assert any(labels and selects(labels, pod_labels(gateway)) for labels in own)


def test_gateways_are_scaled_by_load_or_a_number():
    (scaler,) = of_kind(render(GATEWAY), "HorizontalPodAutoscaler")
    (gateway,) = of_component(render(GATEWAY), "gateway")
    assert scaler["spec"]["scaleTargetRef"]["name"] == gateway["metadata"]["name"]
    assert "replicas" not in gateway["spec"]
    fixed = render(GATEWAY, {"gateway.autoscaling.enabled": False, "gateway.replicas": 3})
    assert of_kind(fixed, "HorizontalPodAutoscaler") == []
    assert of_component(fixed, "gateway")[0]["spec"]["replicas"] == 3


@each_file
def test_metrics_are_at_the_port_of_that_name(file):
    objects = render(file)
    for found in of_kind(objects, "Deployment", "StatefulSet"):
        (container,) = pod_spec(found)["containers"]
        (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == "metrics"]
        assert port == int(args_of(container)["--metrics-port"])
        services = [found["spec"] for found in of_kind(objects, "Service")]
        shown = [item for spec in services if selects(spec["selector"], pod_labels(found)) for item in spec["ports"]]
        assert shown.count({"name": "metrics", "port": port, "targetPort": "metrics"}) == 1


@each_file
def test_the_grace_period_is_ten_seconds_longer_than_the_drain(file):
    for found in of_kind(render(file), "Deployment", "StatefulSet"):
        spec = pod_spec(found)
        (container,) = spec["containers"]
        drain = int(args_of(container)["--shutdown-timeout"])
        assert spec["terminationGracePeriodSeconds"] == drain + 10
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert hook[0] == "sleep"
        assert int(hook[1]) < 10


def test_executors_take_connections_of_schedulers_only():
    objects = render(GPUS)
    executors = named(objects, "NetworkPolicy", "rel-paceline-executors")["spec"]
    assert executors["policyTypes"] == ["Ingress"]
    ((rule,),) = (executors["ingress"],)
    (peer,) = rule["from"]
    assert peer.keys() == {"podSelector"}
    selector = peer["podSelector"]["matchLabels"]
    assert [found["kind"] for found in with_pods(objects) if selects(selector, pod_labels(found))] == ["Deployment"]
    assert rule["ports"] == [{"port": 50061}]
    (calls,) = named(objects, "NetworkPolicy", "rel-paceline-scheduler")["spec"]["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"team": "search"}}} in calls["from"]
    assert len(calls["from"]) == 2
    assert calls["ports"] == [{"port": 50051}]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_gpu_of_an_executor_is_a_rank_of_one_container(count):
    """A CPU for each and two more, if nothing else is asked for; NCCL's shared memory."""
    objects = render(GPUS, {"pools.large.gpu.count": count, "pools.large.resources": {}})
    assert [problem for found in objects if (problem := problem_of(found, KUBERNETES_VERSIONS[-1]))] == []
    spec = pod_spec(of_kind(objects, "StatefulSet")[0])
    (container,) = spec["containers"]
    shared = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}.get("shm")
    found = args_of(container).get("--tensor-parallel-size"), container["resources"].get("requests"), shared, mounted
    assert container["resources"]["limits"] == {"nvidia.com/gpu": count}
    if count == 1:
        assert found == (None, None, [], None)
    else:
        memory = {"medium": "Memory", "sizeLimit": f"{count}Gi"}
        assert found == (str(count), {"cpu": str(count + 2)}, [memory], "/dev/shm")  # noqa: S108 - NCCL's


@pytest.mark.parametrize("resources", [{"requests": {"cpu": "6500m"}}, {"limits": {"cpu": 6}}])
def test_cpus_that_are_enough_for_the_ranks_stay_as_asked_for(resources):
    (container,) = pod_spec(of_kind(render(GPUS, {"pools.large.resources": resources}), "StatefulSet")[0])["containers"]
    merged = {name: container["resources"].get(name, {}).get("cpu") for name in ("requests", "limits")}
    assert merged == {name: resources.get(name, {}).get("cpu") for name in ("requests", "limits")}


def test_an_executor_of_two_nodes_is_its_leader():
    """Workers have a part of its ranks, and neither ports nor probes: their process ends with any rank."""
    objects = render(TWO_NODES)
    (group,) = of_kind(objects, "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], group["spec"]["startupPolicy"]) == (2, "LeaderCreated")
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    leader, worker = (part_of(group, part) for part in ("leader", "worker"))
    executor, node = (pod_spec(part)["containers"][0] for part in (leader, worker))
    assert executor == node | {name: executor[name] for name in ("ports", *PROBES)}
    assert not node.keys() & {"ports", *PROBES}
    args = args_of(node)
    assert (args["--tensor-parallel-size"], node["resources"]["limits"]["nvidia.com/gpu"]) == ("16", 8)
    given = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "rel-large-0.rel-large.models"}
    config = parse_config(["--insecure", *(expanded(f"{name}={args[name]}", given) for name in WITH_NODES)])
    assert (config.node.address, config.share.ranks) == ("rel-large-0.rel-large.models:7070", range(8, 16))
    services = of_kind(objects, "Service")
    assert [selects(found["spec"]["selector"], pod_labels(worker)) for found in services] == [False] * len(services)


def test_nodes_of_a_pool_reach_one_another_and_are_disrupted_group_by_group():
    """A budget of one pod: the first that goes takes its group along, and no other goes before all are ready."""
    objects = render(TWO_NODES)
    parts = [pod_labels(part_of(of_kind(objects, "LeaderWorkerSet")[0], part)) for part in ("leader", "worker")]
    (small,) = of_kind(objects, "StatefulSet")
    policy = named(objects, "NetworkPolicy", "rel-paceline-large")["spec"]
    (rule,) = policy["ingress"]
    budget = named(objects, "PodDisruptionBudget", "rel-paceline-large")["spec"]
    assert (rule.keys(), budget["maxUnavailable"]) == ({"from"}, 1)
    for selector in (policy["podSelector"], rule["from"][0]["podSelector"], budget["selector"]):
        assert [selects(selector["matchLabels"], labels) for labels in (*parts, pod_labels(small))] == [
            True,
            True,
            False,
        ]


def test_an_autoscaler_adds_groups_of_nodes():
    (scaled,) = of_kind(render(TWO_NODES, {"pools.large.autoscaling.enabled": True}), "ScaledObject")
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "rel-paceline-large"}
    assert scaled["spec"]["scaleTargetRef"] == target


def test_pods_that_are_told_where_to_go_are_spread_among_their_own_kind():
    """Zones are one part of affinity; a constraint that says which pods it counts is left as it is."""
    large, other = of_kind(render(GPUS), "StatefulSet")
    assert pod_spec(large)["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
    assert pod_spec(other)["affinity"] == {"nodeAffinity": pod_spec(large)["affinity"]["nodeAffinity"]}
    (constraint,) = pod_spec(large)["topologySpreadConstraints"]
    assert constraint["labelSelector"] == large["spec"]["selector"]
    (scheduler,) = of_kind(render(CLAIM), "Deployment")
    (constraint,) = pod_spec(scheduler)["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
    assert constraint["labelSelector"] == {"matchLabels": {"app.kubernetes.io/component": "scheduler"}}


def test_clients_outside_have_a_service_of_their_own():
    """Kubernetes lets no headless Service become another one, and clients inside need that one."""
    objects = render(CLAIM)
    outside, headless = (named(objects, "Service", f"rel-paceline{end}") for end in ("-external", ""))
    assert outside["spec"]["selector"] == headless["spec"]["selector"]
    assert outside["spec"]["ports"] == [{"name": "grpc", "port": 443, "targetPort": "grpc"}]
    assert (outside["spec"]["type"], headless["spec"]["clusterIP"]) == ("LoadBalancer", "None")
    assert [bool(found["metadata"].get("annotations")) for found in (outside, headless)] == [True, False]
    alone = named(render(MINIMAL, {"service.annotations": {"a": "b"}}), "Service", "rel-paceline")
    assert alone["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize("file", [CLAIM, INIT, HOST_PATH], ids=lambda file: file.stem)
def test_a_model_of_a_volume_is_read_where_it_is_mounted(file):
    for found in of_kind(render(file), "StatefulSet"):
        (container,) = pod_spec(found)["containers"]
        assert args_of(container)["--model"].startswith("/models/")
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/models"]
        assert mount["readOnly"] is True
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


def test_what_a_container_fetches_is_what_the_executor_reads():
    for found in of_kind(render(INIT), "StatefulSet"):
        first, executor = containers(pod_spec(found))
        writes, reads = [
            {"name": mount["name"], "subPath": mount["subPath"]}
            for container in (first, executor)
            for mount in container["volumeMounts"]
            if mount["mountPath"] == "/models"
        ]
        assert writes == reads
        assert [claim["metadata"]["name"] for claim in found["spec"]["volumeClaimTemplates"]] == ["cache"]


@each_file
def test_the_test_asks_every_model_once(file):
    """By the name that its pool gives it; a model without one is the only one."""
    objects = render(file)
    executors = [found for found in with_pods(objects) if pod_labels(found)[COMPONENT] == "executor"]
    pools = [args_of(pod_spec(found)["containers"][0]) for found in executors]
    (test,) = of_kind(objects, "Pod")
    asked = [args_of(container).get("--model") for container in pod_spec(test)["containers"]]
    assert sorted(map(str, asked)) == sorted({str(args.get("--served-model-name")) for args in pools})


@each_file
def test_secrets_come_by_reference_only(file):
    objects = render(file)
    assert of_kind(objects, "Secret") == []
    for found in with_pods(objects):
        for container in containers(pod_spec(found)):
            for variable in container.get("env", ()):
                assert "TOKEN" not in variable["name"] or "secretKeyRef" in variable["valueFrom"]


@pytest.mark.parametrize("file", [GPUS, CLAIM, GATEWAY], ids=lambda file: file.stem)
def test_each_program_gets_its_own_certificate(file):
    """As a folder, so that a new one arrives without a restart; never that of another program."""
    objects = render(file)
    secrets = {}
    for found in with_pods(objects):
        (volume,) = [volume for volume in pod_spec(found)["volumes"] if volume["name"] == "tls"]
        component = pod_labels(found)["app.kubernetes.io/component"]
        secrets.setdefault(component, set()).add(volume["secret"]["secretName"])
        for container in pod_spec(found)["containers"]:
            assert {"name": "tls", "mountPath": "/etc/paceline/tls", "readOnly": True} in container["volumeMounts"]
            assert args_of(container)["--tls-dir"] == "/etc/paceline/tls"
            assert "--insecure" not in container["args"]
    assert secrets.keys() == {"scheduler", "executor", "test"} | ({"gateway"} if file == GATEWAY else set())
    assert {len(names) for names in secrets.values()} == {1}
    assert len(set.union(*secrets.values())) == len(secrets)
    made = {found["spec"]["secretName"]: found["spec"]["uris"] for found in of_kind(objects, "Certificate")}
    if file == GPUS:
        for component, role in (("scheduler", "scheduler"), ("executor", "executor"), ("test", "client/helm-test")):
            assert [made[name] for name in secrets[component]] == [[f"paceline://{role}"]]


@each_file
def test_containers_are_made_of_images_that_are_here(file):
    for found in with_pods(render(file)):
        for container in pod_spec(found)["containers"]:
            exposed = " ".join(image_of(container["image"]).all_of("EXPOSE")).split()
            assert {str(port["containerPort"]) for port in container.get("ports", ())} <= set(exposed)


@each_file
def test_each_folder_that_an_image_writes_to_is_a_volume(file):
    """The root file system is read-only."""
    images = {image.name: image for image in all_images()}
    for found in of_kind(render(file), "Deployment", "StatefulSet"):
        (container,) = pod_spec(found)["containers"]
        image = images[image_of(container["image"]).name.removeprefix("paceline-")]
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        for name, folder in image.environment.items():
            if name.endswith("_DIR") or name == "HOME":
                assert folder.startswith(tuple(writable)), name


def test_schedulers_alone_restart_where_their_image_alone_is_another():
    """So an upgrade can be made in two halves; and a chart of another version restarts nothing by itself."""
    before = render(CHART / "ci" / "upgrade.yaml", {"image.tag": "0.1.0"})
    after = render(CHART / "ci" / "upgrade.yaml")
    assert of_kind(before, "StatefulSet") == of_kind(after, "StatefulSet")
    assert of_kind(before, "Deployment") != of_kind(after, "Deployment")
    for found in with_pods(after)[:2]:
        assert not pod_labels(found).keys() & {"helm.sh/chart", "app.kubernetes.io/version"}
