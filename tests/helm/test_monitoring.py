"""Scraping, alerts, dashboard and autoscaling: all ask for metrics that there are, and each alert has its section."""

import inspect
import itertools
import json
import re

import httpx2
import promql_parser
import pytest
import yaml

from chart_checks.cluster import Cluster
from chart_checks.helm import CHART, VALUES_FILES, named, of_kind, pod_spec, render, selects
from chart_checks.pods import no_pods_left
from chart_checks.promql import problems_of, selectors
from paceline.plan.codes import CodedError
from paceline.process.metrics_port import PREFIX
from paceline_executor.link import metrics as executor
from paceline_scheduler import errors
from paceline_scheduler.observers import definitions as scheduler
from repository_checks.readme import broken_links
from repository_checks.sources import ROOT

MONITORING = CHART / "ci" / "monitoring.yaml"
MINIMAL = CHART / "ci" / "minimal.yaml"
RUNBOOK = CHART / "RUNBOOK.md"
OBJECTS = render(MONITORING)
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}
(RULES,) = of_kind(OBJECTS, "PrometheusRule")
ALERTS = {rule["alert"]: rule for group in RULES["spec"]["groups"] for rule in group["rules"]}
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
VALUES_OF_LABELS = {
    "phase": {"prepare", "forward", "sample"},
    "reason": {kind.reason for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CodedError)},
}


def queries():
    """Every expression of alerts, autoscaling and dashboard, by where it stands."""
    for name, rule in ALERTS.items():
        yield name, rule["expr"]
    for found in of_kind(OBJECTS, "ScaledObject"):
        for trigger in found["spec"]["triggers"]:
            yield trigger["name"], trigger["metadata"]["query"]
    for panel in PANELS:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            yield name, re.fullmatch(r"label_values\((.*), \w+\)", variable["definition"])[1]


def matched(query):
    """The labels that a query compares, each with the texts that it compares it with."""
    for selector in selectors(promql_parser.parse(query)):
        for matcher in selector.matchers.matchers:
            yield matcher.name, matcher.value.split("|")


def test_every_query_asks_for_metrics_and_labels_that_there_are():
    problems = {(name, problem) for name, query in queries() for problem in problems_of(query)}
    assert {problem for name, problem in problems if name not in VARIABLES} == set()
    assert {problem.partition(" ")[2] for name, problem in problems if name in VARIABLES} == {
        "is of every release: name its job"
    }


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ('sum(rate(paceline_tokens_total{job="a"}[5m]))', "no program shows paceline_tokens_total"),
        ('paceline_executors{job="a",model_name="b"}', "paceline_executors has no label model_name"),
        ('paceline_step_seconds{job="a"}', "no program shows paceline_step_seconds"),
        ('paceline_num_preemptions_total_count{job="a"}', "no program shows paceline_num_preemptions_total_count"),
        ('sum by (le) (paceline_step_seconds_count{job="a"})', "nothing in it has the label le"),
        ('paceline_executors{job="a"} * on (pool) paceline_executors{job="a"}', "nothing in it has the label pool"),
        ('paceline_executor_rows_total{job="a"}', "is asked of the wrong program"),
        ('paceline_executors{job="a-executors"}', "is asked of the wrong program"),
        ("paceline_executors", "is of every release"),
        ('process_start_time_seconds{job="a",executor="b"}', "process_start_time_seconds has no label executor"),
        ("sum(paceline_executors", "unclosed left parenthesis"),
    ],
)
def test_a_query_that_nothing_answers_is_found(query, problem):
    assert [found for found in problems_of(query) if problem in found]


def test_every_label_is_compared_with_a_value_that_it_may_have():
    """An alert on a misspelt state would never come."""
    compared = [
        (name, label, value)
        for name, query in queries()
        for label, values in matched(query)
        if label in VALUES_OF_LABELS
        for value in values
    ]
    assert [each for each in compared if each[2] not in VALUES_OF_LABELS[each[1]]] == []
    assert {label for _, label, _ in compared} == set(VALUES_OF_LABELS)


def test_every_alert_has_its_section_and_every_section_its_alert():
    sections = dict(
        re.findall(
            r"^## (Paceline\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
    )
    assert sections.keys() == ALERTS.keys()
    for name, text in sections.items():
        assert re.findall(r"^\*\*([A-Za-z ]+)\.\*\*", text, re.MULTILINE) == ["It means", "Look at", "Do"], name
        assert ALERTS[name]["annotations"]["runbook_url"] == f"https://wiki.example.com/paceline#{name.lower()}"


def test_without_another_address_alerts_lead_into_the_repository():
    (rules,) = of_kind(render(MINIMAL, {"monitoring.rules.enabled": True}), "PrometheusRule")
    for rule in rules["spec"]["groups"][0]["rules"]:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / path == RUNBOOK
        assert re.search(rf"^## {anchor}$", RUNBOOK.read_text(encoding="utf-8"), re.IGNORECASE | re.MULTILINE)


def test_commands_of_the_runbook_are_calls_that_there_are():
    text = RUNBOOK.read_text(encoding="utf-8")
    protos = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "protos" / "paceline" / "v1").glob("*.proto"))
    calls = re.findall(r"paceline\.v1\.(\w+)/(\w+)", text)
    assert calls
    for service, call in calls:
        assert re.search(rf"service {service} {{.*?rpc {call}\(", protos, re.DOTALL)
    assert set(re.findall(r"`(paceline_\w+)`", text)) <= {PREFIX + each.name for each in definitions()}
    assert list(broken_links(RUNBOOK)) == []


def definitions():
    return (*scheduler.READ, *scheduler.COUNTED, *executor.READ, *executor.COUNTED)


def test_a_first_token_that_is_late_can_be_told_from_one_in_time():
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    seconds = schema["properties"]["monitoring"]["properties"]["rules"]["properties"]["ttftSeconds"]
    assert seconds["exclusiveMaximum"] == scheduler.FIRST_TOKEN_BOUNDS_S[-1]


def test_the_service_monitor_finds_both_services_and_their_port():
    (monitor,) = of_kind(OBJECTS, "ServiceMonitor")
    found = [
        service["metadata"]["name"]
        for service in of_kind(OBJECTS, "Service")
        if selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        and monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert found == ["rel-paceline-executors", "rel-paceline"]
    compared = {
        (label, *values)
        for name, query in queries()
        if "$" not in query
        for label, values in matched(query)
        if label in ("job", "namespace")
    }
    assert compared == {("job", "rel-paceline"), ("job", "rel-paceline-executors"), ("namespace", "models")}


def test_prometheus_is_let_in_where_it_is_told_to_scrape():
    """By a ServiceMonitor, from its usual namespace, or by whoever names it; without either nobody is."""
    monitored = render(MINIMAL, {"monitoring.serviceMonitor.enabled": True})
    named_alone = render(MINIMAL, {"networkPolicy.metrics": [PEER]})
    for name, port in (("rel-paceline-executors", 9465), ("rel-paceline-scheduler", 9464)):
        calls, metrics = named(OBJECTS, "NetworkPolicy", name)["spec"]["ingress"]
        assert metrics["ports"] == [{"port": port}]
        assert metrics["from"] == [PEER]
        assert PEER not in calls["from"]
        assert named(named_alone, "NetworkPolicy", name)["spec"]["ingress"][1] == metrics
        (usual,) = named(monitored, "NetworkPolicy", name)["spec"]["ingress"][1]["from"]
        assert usual == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        assert len(named(render(MINIMAL), "NetworkPolicy", name)["spec"]["ingress"]) == 1


def test_an_autoscaled_pool_leaves_its_replicas_to_the_autoscaler():
    """An upgrade would set them back; caches stay for the executor that comes again; the other pool is as it was."""
    (scaled,) = of_kind(OBJECTS, "ScaledObject")
    elastic, fixed = of_kind(OBJECTS, "StatefulSet")
    assert scaled["spec"]["scaleTargetRef"]["name"] == elastic["metadata"]["name"]
    assert "replicas" not in elastic["spec"]
    assert fixed["spec"]["replicas"] == 2
    retained = [found["spec"]["persistentVolumeClaimRetentionPolicy"]["whenScaled"] for found in (elastic, fixed)]
    assert retained == ["Retain", "Delete"]
    served = [argument for argument in pod_spec(elastic)["containers"][0]["args"] if "served-model-name" in argument]
    for trigger in scaled["spec"]["triggers"]:
        values = dict(matched(trigger["metadata"]["query"]))
        assert served == [f"--served-model-name={values['model_name'][0]}"]
        assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_a_release_of_one_model_scales_by_all_its_requests():
    (scaled,) = of_kind(render(MINIMAL, {"poolDefaults.autoscaling.enabled": True}), "ScaledObject")
    assert {label for trigger in scaled["spec"]["triggers"] for label, _ in matched(trigger["metadata"]["query"])} == {
        "namespace",
        "job",
    }


GROUPS = {"LeaderWorkerSet"}
ROUTES = {"HTTPRoute"}


def test_nothing_of_it_is_there_unasked():
    """A cluster without these kinds would refuse the release."""
    kinds = {"ServiceMonitor", "PrometheusRule", "ScaledObject", *GROUPS, *ROUTES}
    unasked = {file.stem: kinds & {found["kind"] for found in render(file)} for file in VALUES_FILES}
    assert {stem: found for stem, found in unasked.items() if found} == {
        "gateway": ROUTES,
        "monitoring": kinds - GROUPS - ROUTES,
        "two-nodes": GROUPS,
    }


def test_the_dashboard_is_what_grafana_loads():
    config = named(OBJECTS, "ConfigMap", "rel-paceline-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    ((name, text),) = config["data"].items()
    assert name.endswith(".json")
    assert json.loads(text) == DASHBOARD
    assert len(text) < 1 << 19


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    boxes = [panel["gridPos"] for panel in PANELS]
    for box in boxes:
        assert box["x"] >= 0
        assert box["w"] > 0
        assert box["h"] > 0
        assert box["x"] + box["w"] <= 24
    for one, other in itertools.combinations(boxes, 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )


def test_panels_stand_under_the_rows_that_operators_look_for():
    rows = {}
    for panel in sorted(PANELS, key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"])):
        if panel["type"] == "row":
            under = rows.setdefault(panel["title"], [])
        else:
            under.append(panel)
    assert list(rows) == ["Traffic", "Latency", "KV cache", "Executors", "Recovery"]
    for panel in itertools.chain(*rows.values()):
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
    assert all(rows.values())


def test_the_dashboard_takes_any_data_source_and_knows_its_variables():
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["datasource"]["type"] == "datasource"
    drawn = [panel for panel in PANELS if panel["type"] != "row"]
    assert [part for panel in drawn for part in (panel, *panel["targets"]) if part["datasource"] != wanted] == []
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval"} == set(VARIABLES)


def test_legends_name_labels_that_the_query_keeps():
    """Grafana would show nothing in their place."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([\w, ]*\b{label}\b[\w, ]*\)", target["expr"]), panel["title"]


@pytest.mark.slow  # starts the pods as processes
async def test_rendered_pods_show_what_the_queries_ask_for(tmp_path):
    values = {"standby.enabled": False, "scheduler.preStopSeconds": 0, "pools.nothing.replicas": 1}
    objects = render(CHART / "ci" / "without-a-model.yaml", values)
    shown = set()
    async with no_pods_left() as pods, httpx2.AsyncClient(trust_env=False, timeout=60) as client:
        cluster = Cluster(tmp_path / "pods", pods)
        await cluster.install(objects)
        for service in of_kind(objects, "Service"):
            (port,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "metrics"]
            address = cluster.addresses_of(service["metadata"]["name"])[0]
            answer = await client.get(f"http://{address}:{port}/metrics")
            shown |= set(re.findall(r"^# TYPE (\w+) ", answer.text, re.MULTILINE))
        await cluster.uninstall()
    asked = {selector.name for _, query in queries() for selector in selectors(promql_parser.parse(query))}
    assert {name for name in asked if name not in shown and name.rpartition("_")[0] not in shown} == set()


def test_durations_and_severities_are_of_few_kinds():
    assert {rule["labels"]["severity"] for rule in ALERTS.values()} == {"warning", "critical"}
    lost = ALERTS["PacelineExecutorLost"]["for"]
    assert (
        int(lost.removesuffix("s"))
        > yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["poolDefaults"]["startupBudgetSeconds"]
    )
