"""The alerts by Prometheus' own tool: each comes when it should, and stays away when it should."""

import re
import shutil
import subprocess

import pytest
import yaml

from chart_checks.helm import CHART, of_kind, render
from repository_checks.programs import BIN

PROMTOOL = next((path for path in (str(BIN / "promtool"), "promtool") if shutil.which(path)), None)
pytestmark = [
    pytest.mark.skipif(
        PROMTOOL is None,
        reason="promtool is not here: install Prometheus, or run make test where apt-get finds Debian's package of it",
    ),
    pytest.mark.xdist_group("test_alerts"),  # one run of promtool for all cases
]
# One of the pools has executors of two nodes.
(RULES,) = of_kind(
    render(CHART / "ci" / "monitoring.yaml", {"pools.fixed.gpu": {"count": 8, "nodes": 2}}), "PrometheusRule"
)
NAMES = [rule["alert"] for group in RULES["spec"]["groups"] for rule in group["rules"]]
EVERY_MINUTE = "1m"
MINUTES = 40


def series(name, values, *, pod="a", **labels):
    """One of a scheduler, in the notation of promtool: first value, step, how often."""
    labels = {"namespace": "models", "job": "rel-paceline", "instance": pod, "pod": pod, **labels}
    text = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"paceline_{name}{{{text}}}", "values": values}


def waiting(values, **labels):
    return series("num_requests_waiting", values, model_name="m", **labels)


def running(values, **labels):
    return series("num_requests_running", values, model_name="m", **labels)


def steps(values, executor="e:1", model="m"):
    """Steps of an executor, and what it serves."""
    return [
        series("step_seconds_count", values, executor=executor, phase="forward"),
        series("cache_config_info", "1x40", executor=executor, model_name=model, block_size="16", num_gpu_blocks="100"),
    ]


def first_tokens(in_time, late):
    """How many come each minute within 2.5 s, and later than 10 s."""
    return [
        series("time_to_first_token_seconds_bucket", f"0+{number}x40", model_name="m", le=le)
        for le, number in (("1.0", 0), ("2.5", in_time), ("10.0", in_time), ("+Inf", in_time + late))
    ]


def preemptions(values):
    """Among 60 requests that end each minute, 20 of them otherwise than the rest."""
    return [
        series("num_preemptions_total", values, model_name="m"),
        series("request_success_total", "0+40x40", model_name="m", finished_reason="stop"),
        series("request_success_total", "0+20x40", model_name="m", finished_reason="length"),
    ]


def lost(values, executor="e:1", model="m"):
    return series("executor_lost_seconds", values, executor=executor, model_name=model)


def started(values):
    """When an executor was started."""
    labels = 'namespace="models",job="rel-paceline-executors",instance="e:9465",pod="e"'
    return [{"series": f"process_start_time_seconds{{{labels}}}", "values": values}]


def recreated(num_times, pod):
    """A group of nodes, whose leader has another address each time."""
    labels = f'namespace="models",job="rel-paceline-executors",pod="{pod}"'
    return [
        {
            "series": f'process_start_time_seconds{{{labels},instance="e{number}:9465"}}',
            "values": f"_x{10 * number} {600 * number}x9 stale",
        }
        for number in range(1, num_times + 1)
    ]


def refused(values, reason):
    return [series("admission_rejections_total", values, reason=reason)]


KV_FULL = series("kv_cache_usage_perc", "0.97x40", model_name="m")
ALL_IS_WELL = [
    *(series("executors", "2x40", state="ready"), series("executors", "0x40", state="lost"), running("6x40")),
    *(lost("0x40"), lost("0x40", "e:2")),
    *(waiting("1x40"), *steps("0+900x40"), *first_tokens(60, 0), *preemptions("0x40")),
    series("kv_cache_usage_perc", "0.5x40", model_name="m"),
]
COMES = {
    "queue grows": ("PacelineQueueGrowing", [waiting("0+20x40")]),
    "queue grows over two schedulers": (
        "PacelineQueueGrowing",
        [waiting("200+20x20 stale"), waiting("_x21 620+20x20", pod="b")],
    ),
    "cache is full": ("PacelineKvCacheFull", [KV_FULL, waiting("3x40")]),
    "executor is lost": ("PacelineExecutorLost", [lost("0x5 60+60x35"), lost("0x40", "e:2")]),
    "executor restarts every ten minutes": ("PacelineExecutorRestarts", started("60x9 _ 660x9 _ 1320x9 _ 1980x9")),
    "a group of nodes is recreated every ten minutes": (
        "PacelineExecutorRestarts",
        recreated(4, "rel-paceline-fixed-1"),
    ),
    "the only executor of a model is lost": ("PacelineModelGone", [lost("0x5 60+60x35"), lost("0x40", "e:2", "other")]),
    "both executors of a model are lost": ("PacelineModelGone", [lost("60+60x40"), lost("60+60x40", "e:2")]),
    "no executor is looked for any more": (
        "PacelineModelGone",
        [series("executors", "1x5 0x35", state="ready"), series("executors", "0x40", state="lost")],
    ),
    "eight and more in a hundred": ("PacelinePreemptions", preemptions("0+6x40")),
    "preempted and nothing ends": (
        "PacelinePreemptions",
        [
            *preemptions("0+6x40")[:1],
            series("request_success_total", "7x40", model_name="m", finished_reason="stop"),
        ],
    ),
    "one in ten is late": ("PacelineFirstTokenLate", first_tokens(54, 6)),
    "all are later than the last bucket": ("PacelineFirstTokenLate", first_tokens(0, 9)),
    "steps stop": ("PacelineNoProgress", [running("2x40"), waiting("0x40"), *steps("0+900x10 9000x30")]),
    "no executor is left": ("PacelineNoProgress", [running("0x40"), waiting("5x40")]),
    "another model goes on": (
        "PacelineNoProgress",
        [running("2x40"), waiting("0x40"), *steps("0x40"), *steps("0+900x40", "e:2", "other")],
    ),
    "queue is full": ("PacelineRefusing", refused("0+1x40", "QUEUE_FULL")),
    "no executor is ready": ("PacelineRefusing", refused("0+1x40", "NO_EXECUTOR")),
    "no scheduler": ("PacelineNoScheduler", [series("executors", "2x40", job="other", state="ready")]),
}
STAYS_AWAY = {
    "all is well": (None, ALL_IS_WELL),
    "queue is long and constant": ("PacelineQueueGrowing", [waiting("500x40")]),
    "queue is short and grows": ("PacelineQueueGrowing", [waiting("0+2x40")]),
    "a scheduler takes a long queue over": (
        "PacelineQueueGrowing",
        [waiting("500x20 stale"), waiting("_x21 0 500x18", pod="b")],  # clients come back within a minute
    ),
    "another release has a queue": ("PacelineQueueGrowing", [waiting("0+20x40", namespace="other")]),
    "cache is full and nobody waits": ("PacelineKvCacheFull", [KV_FULL, waiting("0x40")]),
    "executor restarts": ("PacelineExecutorLost", [lost("0x5 60+60x15 0x20")]),
    "executor is upgraded twice": ("PacelineExecutorRestarts", started("60x9 _ 660x9 _ 1320x19")),
    "a group of nodes is upgraded twice": ("PacelineExecutorRestarts", recreated(3, "rel-paceline-fixed-1")),
    "the only executor restarts": ("PacelineModelGone", [lost("0x5 60+60x15 0x20")]),
    "another executor of the model is left": ("PacelineModelGone", [lost("60+60x40"), lost("0x40", "e:2")]),
    "a scheduler that never had the executor looks for it": ("PacelineModelGone", [lost("60+60x40", model="")]),
    "seven in a hundred": ("PacelinePreemptions", preemptions("0+4x40")),
    "two in a hundred are late": ("PacelineFirstTokenLate", first_tokens(98, 2)),
    "nobody asks": ("PacelineNoProgress", [running("0x40"), waiting("0x40"), *steps("7x40")]),
    "steps go on": ("PacelineNoProgress", [running("2x40"), waiting("9x40"), *steps("0+1x40")]),
    "a standby sees no steps": (
        "PacelineNoProgress",
        [running("2x40"), waiting("0x40"), *steps("0+9x40"), running("0x40", pod="b"), waiting("0x40", pod="b")],
    ),
    "requests are wrong": ("PacelineRefusing", refused("0+9x40", "INVALID_FIELD")),
    "queue was full for a moment": ("PacelineRefusing", refused("0x10 9x30", "QUEUE_FULL")),
    "a scheduler is replaced": (
        "PacelineNoScheduler",
        [series("executors", "2x20 stale", state="ready"), series("executors", "_x22 2x18", pod="b", state="ready")],
    ),
}


CASES = {**COMES, **STAYS_AWAY}


def promtool(folder, *arguments, rules=RULES, tests=()):
    """What promtool says in a folder where the rules are, and `test.yaml` with these tests."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": EVERY_MINUTE, "tests": list(tests)}
    (folder / "test.yaml").write_text(yaml.safe_dump(content))
    return subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fired(tmp_path_factory):
    """The alerts that came at any time of each case: samples that promtool says were there though none is expected."""
    ever = f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{MINUTES}m]))'
    tests = [
        {
            "interval": EVERY_MINUTE,
            "input_series": input_series,
            "promql_expr_test": [
                {"expr": f'label_replace({ever}, "case", "{case}", "", "")', "eval_time": f"{MINUTES}m"}
            ],
        }
        for case, (_, input_series) in CASES.items()
    ]
    said = promtool(tmp_path_factory.mktemp("alerts"), "test", "rules", "test.yaml", tests=tests)
    samples = re.findall(r'\{alertname="(\w+)", case="([^"]+)"\} \S+', said.stdout + said.stderr)
    assert bool(said.returncode) == bool(samples), said.stdout + said.stderr
    return {case: {name for name, of in samples if of == case} for case in CASES}


def test_prometheus_takes_the_rules(tmp_path):
    said = promtool(tmp_path, "check", "rules", "rules.yaml")
    assert said.returncode == 0, said.stderr
    assert f"{len(NAMES)} rules found" in said.stdout


def test_prometheus_would_not_take_worse_rules(tmp_path):
    worse = {"spec": {"groups": [{"name": "a", "rules": [{"alert": "A", "expr": "sum("}]}]}}
    assert promtool(tmp_path, "check", "rules", "rules.yaml", rules=worse).returncode == 1


def test_every_alert_is_seen_to_come_and_to_stay_away():
    assert {name for name, _ in COMES.values()} == set(NAMES)
    assert {name for name, _ in STAYS_AWAY.values()} == {*NAMES, None}


@pytest.mark.parametrize("case", COMES)
def test_an_alert_comes_when_it_should(case, fired):
    assert COMES[case][0] in fired[case]


@pytest.mark.parametrize("case", STAYS_AWAY)
def test_an_alert_stays_away_when_it_should(case, fired):
    name, _ = STAYS_AWAY[case]
    assert fired[case] == set() if name is None else name not in fired[case]


def test_an_alert_says_what_and_how_many(tmp_path):
    (rule,) = [rule for rule in RULES["spec"]["groups"][0]["rules"] if rule["alert"] == "PacelineQueueGrowing"]
    test = {
        "interval": EVERY_MINUTE,
        "input_series": [waiting("0+20x40")],
        "alert_rule_test": [
            {
                "alertname": rule["alert"],
                "eval_time": f"{MINUTES}m",
                "exp_alerts": [
                    {
                        "exp_labels": {"model_name": "m", "severity": "warning"},
                        "exp_annotations": {
                            "summary": "The queue of m grows",
                            "description": "800 requests wait for m, and for 10 minutes they have become more.",
                            "runbook_url": rule["annotations"]["runbook_url"],
                        },
                    }
                ],
            }
        ],
    }
    said = promtool(tmp_path, "test", "rules", "test.yaml", tests=[test])
    assert said.returncode == 0, said.stdout + said.stderr
