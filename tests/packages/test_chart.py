"""The chart: what Helm makes of its values, whether Kubernetes takes that, and a daemon that runs as its DaemonSet says."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool.config.config import Config, load_config
from kvpool.units import parse_duration, parse_size
from kvpool_tools.cli.kvpoolctl import TIMEOUT
from tests.packages.charts import DEFAULTS, LINT, RENDER_NOTES, Document, faults, one, refusal, render, render_all
from tests.packages.containers import Container, Running, Volume
from tests.packages.images import Image
from tests.packages.pods import Pod
from tests.packages.roots import TREE
from tests.packages.tools import ask, tool

SOURCE = TREE / "packaging/chart/kvpool"
# The oldest that Chart.yaml admits, and the newest that is known here.
KUBERNETES = ("1.25", "1.37")
# What everybody must set.
IMAGE: dict[str, Any] = {"image": {"repository": "registry.example/kvpool"}}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "secrets": {
        "secretName": "kvpool-keys",
        "config": {
            "server": {"domain_secret_file": "/secrets/domain"},
            "events": {
                "publish": "tcp://127.0.0.1:5557",
                "keys": "/secrets/router.key",
                "allow": "/secrets/routers.allow",
            },
        },
    },
    "fleet by etcd over TLS": {
        "secretName": "kvpool-keys",
        "peer": {"enabled": True},
        "config": {
            "peer": {
                "members": "etcd:https://192.0.2.5:2379/kvpool/members",
                "etcd_ca": "/secrets/ca.pem",
                "encrypt": True,
            }
        },
    },
    "fleet": {"secretName": "kvpool-keys", "peer": {"enabled": True}},
    "disk": {"ssdPath": "/mnt/nvme0", "config": {"ssd": {"capacity": "500GiB", "threads": 8}}},
    "second disk": {
        "ssdPath": "/mnt/nvme1",
        "runPath": "/run/kvpool-1",
        "nodeSelector": {"disks": "2"},
        "config": {"ssd": {"capacity": "500GiB"}, "dram": {"numa": "0"}},
    },
    "huge pages": {
        "resources": {"cpu": "6", "memory": "8Gi", "hugepages-2Mi": "66Gi"},
        "config": {"dram": {"huge_pages": "hugetlb"}},
    },
    "GPU": {"gpu": {"enabled": True}, "config": {"hbm": {"device": "cuda:0", "capacity": "4GiB"}}},
    "other ids": {"uid": 1991, "gid": 1992, "ssdPath": "/mnt/nvme0", "config": {"ssd": {"capacity": "64GiB"}}},
    "metrics": {"metrics": {"enabled": True}},
    "metrics without the operator": {
        "metrics": {"enabled": True, "serviceMonitor": {"enabled": False}, "rules": {"enabled": False}}
    },
}
# Another value for each, which must show.
OTHERS: dict[str, Any] = {
    "image.repository": "other.example/kvpool",
    "image.tag": "1.2.3",
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["registry"],
    "nodeSelector.nvidia.com/gpu.present": None,
    "tolerations": [],
    "priorityClassName": "system-node-critical",
    "uid": 991,
    "gid": 992,
    "runPath": "/run/other",
    "ssdPath": "/mnt/other",
    "config.dram.capacity": "1GiB",
    "resources.cpu": "8",
    "resources.memory": "80Gi",
    "secretName": "keys",
    "gpu.enabled": True,
    "gpu.runtimeClassName": "other",
    "peer.enabled": True,
    "peer.port": 9570,
    "peer.streamPort": 9571,
    "metrics.enabled": True,
    "metrics.image": "other.example/proxy:1",
    "metrics.resources.cpu": "60m",
    "metrics.resources.memory": "65Mi",
    "metrics.serviceMonitor.enabled": False,
    "metrics.serviceMonitor.interval": "30s",
    "metrics.serviceMonitor.labels": {"release": "prometheus"},
    "metrics.rules.enabled": False,
    "metrics.rules.labels": {"release": "prometheus"},
    "metrics.dashboard.enabled": False,
    "metrics.dashboard.labels.grafana_dashboard": "2",
    "terminationGracePeriodSeconds": 700,
    "maxUnavailable": "10%",
}


@pytest.fixture(scope="module")
def chart(built: Callable[[str], Path]) -> Path:
    return built("kvpool-*.tgz")


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm lays them."""
    into: dict[str, Any] = {}
    for part in parts:
        for key, value in copy.deepcopy(dict(part)).items():
            is_map = isinstance(value, dict) and isinstance(into.get(key), dict)
            into[key] = merged(into[key], value) if is_map else value
    return into


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The names of values, through maps that are not empty."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield above + key


def at(name: str, value: Any) -> dict[str, Any]:
    """Values with one of them set; a label's own name has points."""
    section, _, label = name.partition(".")
    if section == "nodeSelector":
        return {section: {label: value}}
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


@pytest.fixture(scope="module")
def releases(chart: Path) -> dict[str, list[Document]]:
    """What is made of each case."""
    made = render_all(chart, [merged(IMAGE, values) for values in CASES.values()])
    return dict(zip(CASES, made, strict=True))


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_what_the_chart_makes(releases: dict[str, list[Document]], version: str) -> None:
    documents = [document for release in releases.values() for document in release]
    assert faults(documents, version) == []
    # It looks closely.
    wrong = copy.deepcopy(
        [one(releases["metrics"], kind) for kind in ("DaemonSet", "ServiceMonitor", "PrometheusRule")]
    )
    wrong[0]["spec"]["template"]["spec"]["tolerate"] = []
    wrong[1]["spec"]["endpoints"][0]["ports"] = "metrics"
    wrong[2]["spec"]["groups"][0]["rules"][0]["expression"] = "1"
    assert len(faults(wrong, version)) == 3


def test_helm_lint_finds_no_fault(chart: Path) -> None:
    for report in ask(LINT, {"chart": str(chart), "values": [merged(IMAGE, values) for values in CASES.values()]}):
        assert report["errors"] == []
        # Of no use to a daemon.
        assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("case", CASES)
def test_a_node_runs_the_daemon_and_an_engine(
    image: Image, releases: dict[str, list[Document]], case: str, keys: dict[str, bytes]
) -> None:
    """The init container, the daemon, its probes, and an engine. What is named and not there, as a device, is done without."""
    values, documents = CASES[case], releases[case]
    pod = Pod(image, documents, {"kvpool-keys": keys}, folder=f"node/{case.replace(' ', '-')}")
    for path in ("mnt/nvme0", "mnt/nvme1"):
        (image.machine.shared / pod.folder / path).mkdir(parents=True, exist_ok=True)
    image.machine.share_file(TREE / "packaging/round_trip.py")
    directories, daemon = pod.container("directories"), pod.container("kvpoold")
    # Again: as at the pod's next start, when everything is there and somebody else's.
    for _ in range(2):
        directories.run()
    probes = {
        name: daemon_of(documents)[name]["exec"]["command"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    small = replace(daemon, command=[*daemon.command, "--set=dram.capacity=16MiB", "--set=hbm.capacity=2MiB"])
    if values.get("ssdPath"):
        small = replace(small, command=[*small.command, "--set=ssd.capacity=64MiB"])
    with Running(small, f"/packages/{pod.folder}/log") as running:
        running.until(replace(daemon, command=probes["startupProbe"]))
        for command in probes.values():
            replace(daemon, command=command).run()
        engine_of(pod, values.get("runPath", "/run/kvpool")).run()
        info = replace(daemon, command=["kvpoolctl", "info"]).run()
        assert ("ssd_state:ok" in info) == bool(values.get("ssdPath")), info
        if case.startswith("metrics"):
            # The proxy's way, which is of the pod's network.
            fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9469/metrics').read().decode())"
            assert "kvpool_ready 1" in replace(daemon, command=["/opt/kvpool/bin/python3", "-c", fetch]).run()
        if case == "secrets":
            assert "events:tcp://127.0.0.1:5557" in info, info
        assert running.stop() == 0, running.wrote()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Entries of a secret, as docs/cluster.md has them made."""
    folder = tmp_path_factory.mktemp("keys")
    authorities: str = ask("import certifi; json.dump(certifi.contents(), sys.stdout)")
    made = {"domain": b"a secret of the fleet", "ca.pem": authorities.encode()}
    for name in ("node", "router"):
        public = generate(folder / f"{name}.key")
        made |= {f"{name}.key": (folder / f"{name}.key").read_bytes(), f"{name}s.allow": public.encode()}
    return made


def generate(file: Path) -> str:
    """A key pair in a file: its public key."""
    command = [sys.executable, "-m", "kvpool_tools.cli.kvpoolctl", "keygen", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def daemon_of(documents: list[Document]) -> Document:
    """The daemon's container in the DaemonSet."""
    found: Document = one(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    return found


def engine_of(pod: Pod, run_path: str) -> Container:
    """An engine of another pod, and of a user that the daemon does not know: the node's folder and the group are all it has."""
    security = pod.spec["securityContext"]
    return Container(
        pod.image,
        ["/opt/kvpool/bin/python3", "-I", "/packages/round_trip.py", f"{run_path}/kvpool.sock"],
        1234,
        1234,
        groups=[security["runAsGroup"]],
        volumes=[Volume(f"/packages/{pod.folder}{run_path}", run_path)],
        environment={"KVPOOL_DAEMON_UID": str(security["runAsUser"])},
    )


@pytest.mark.parametrize("case", CASES)
def test_every_container_has_limits_equal_to_its_requests(releases: dict[str, list[Document]], case: str) -> None:
    """Else the pod is not of the class Guaranteed, and the kubelet's static policy gives it no processors of its own."""
    spec = one(releases[case], "DaemonSet")["spec"]["template"]["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], container["name"]
        assert {"cpu", "memory"} <= set(resources["limits"]), container["name"]
    # Only whole processors are given.
    assert str(spec["containers"][0]["resources"]["limits"]["cpu"]).isdigit()


def config_of(documents: list[Document], folder: Path) -> Config:
    """What the daemon reads."""
    file = folder / "kvpool.toml"
    file.write_text(one(documents, "ConfigMap", "kvpool")["data"]["kvpool.toml"])
    return load_config(str(file))


def test_a_daemon_takes_no_gpu_from_engines(releases: dict[str, list[Document]]) -> None:
    spec, daemon = one(releases["GPU"], "DaemonSet")["spec"]["template"]["spec"], daemon_of(releases["GPU"])
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (spec["nodeSelector"], spec["runtimeClassName"]) == ({"nvidia.com/gpu.present": "true"}, "nvidia")
    assert set(daemon["resources"]["limits"]) == {"cpu", "memory"}
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in daemon["env"]


def test_its_image_is_the_one_that_make_image_names(built: Callable[[str], Path], chart: Path) -> None:
    version = built("kvpool-*-cp311-cp311-*_x86_64.whl").name.split("-")[1]
    spec = one(render(chart, IMAGE), "DaemonSet")["spec"]["template"]["spec"]
    images = {container["image"] for container in (*spec["initContainers"], *spec["containers"])}
    assert images == {f"registry.example/kvpool:{version.replace('+', '-')}"}


def test_the_defaults_fit_the_daemon(chart: Path, tmp_path: Path) -> None:
    documents = render(chart, IMAGE)
    config = config_of(documents, tmp_path)
    spec, limits = one(documents, "DaemonSet")["spec"]["template"]["spec"], daemon_of(documents)["resources"]["limits"]
    assert spec["terminationGracePeriodSeconds"] > config.server.stop_timeout + config.ssd.stop_timeout
    assert int(limits["cpu"]) >= config.ssd.threads + 2
    used = config.dram.capacity + config.dram.segment + (config.dram.token_ids or config.dram.capacity // 16)
    assert parse_size(limits["memory"] + "B") > used + (1 << 30)
    # Half of a probe's time is left for the command's start.
    probes = [
        daemon_of(documents)[name]["timeoutSeconds"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    assert min(probes) >= 4 * parse_duration(TIMEOUT)


def test_probes_ask_what_the_image_asks(chart: Path, image: Image) -> None:
    probes = daemon_of(render(chart, IMAGE))
    assert probes["livenessProbe"]["exec"]["command"] == probes["readinessProbe"]["exec"]["command"] == image.health


def test_the_notes_are_an_engines_pod(chart: Path) -> None:
    values = merged(IMAGE, {"runPath": "/run/other", "uid": 991, "gid": 992})
    notes = ask(RENDER_NOTES, {"chart": str(chart), "values": values})
    engine = yaml.safe_load(notes.partition("such a node has\n")[2])
    assert engine["securityContext"] == {"supplementalGroups": [992]}
    assert (
        engine["volumes"][0]["hostPath"]["path"]
        == engine["containers"][0]["volumeMounts"][0]["mountPath"]
        == "/run/other"
    )
    assert {pair["name"]: pair["value"] for pair in engine["containers"][0]["env"]} == {
        "KVPOOL_SOCKET": "/run/other/kvpool.sock",
        "KVPOOL_DAEMON_UID": "991",
    }


def test_two_releases_on_a_node_share_nothing(chart: Path) -> None:
    """One for each disk, say."""
    first = render(chart, merged(IMAGE, CASES["disk"], {"metrics": {"enabled": True}}))
    second = render(chart, merged(IMAGE, CASES["second disk"], {"metrics": {"enabled": True}}), name="kvpool-1")
    named = [{(each["kind"], each["metadata"]["name"]) for each in release} for release in (first, second)]
    assert not named[0] & named[1]
    paths = [
        {
            volume["hostPath"]["path"]
            for volume in one(release, "DaemonSet")["spec"]["template"]["spec"]["volumes"]
            if "hostPath" in volume
        }
        for release in (first, second)
    ]
    assert not paths[0] & paths[1]
    selectors = [one(release, "DaemonSet")["spec"]["selector"]["matchLabels"] for release in (first, second)]
    assert selectors[0] != selectors[1]


def test_everything_is_in_the_releases_namespace(chart: Path) -> None:
    values = merged(IMAGE, CASES["fleet"], CASES["metrics"])
    documents = render(chart, values, namespace="other")
    assert faults(documents, KUBERNETES[1]) == []
    spaces = {(each["kind"], each["metadata"].get("namespace")) for each in documents}
    assert {space for kind, space in spaces if kind != "ClusterRoleBinding"} == {"other"}
    assert one(documents, "ClusterRoleBinding")["subjects"][0]["namespace"] == "other"
    assert '"dns:kvpool-peers.other.svc:9470"' in one(documents, "ConfigMap", "kvpool")["data"]["kvpool.toml"]
    # A binding is of the cluster: another namespace's release has another.
    assert (
        one(documents, "ClusterRoleBinding")["metadata"] != one(render(chart, values), "ClusterRoleBinding")["metadata"]
    )


def test_what_prometheus_and_grafana_get_is_what_configs_has(chart: Path, tmp_path: Path) -> None:
    documents = render(chart, merged(IMAGE, CASES["metrics"]))
    alerts = yaml.safe_load((TREE / "configs/kvpool-alerts.yml").read_text())
    assert one(documents, "PrometheusRule")["spec"] == alerts
    dashboard = one(documents, "ConfigMap", "kvpool-dashboard")
    assert json.loads(dashboard["data"]["kvpool.json"]) == json.loads(
        (TREE / "configs/grafana-dashboard.json").read_text()
    )
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    # The operator: monitor, to service, to port, to the proxy, to the daemon.
    monitor, service = one(documents, "ServiceMonitor")["spec"], one(documents, "Service", "kvpool-metrics")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    template = one(documents, "DaemonSet")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    proxy = template["spec"]["containers"][1]
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert service["spec"]["ports"][0]["targetPort"] == proxy["ports"][0]["name"]
    assert f"--secure-listen-address=0.0.0.0:{proxy['ports'][0]['containerPort']}" in proxy["args"]
    assert f"--upstream=http://{config_of(documents, tmp_path).server.metrics}/" in proxy["args"]
    # The alerts' job.
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "kvpool"
    # The daemon has no token.
    mounted = [mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]]
    assert ("token" in mounted, template["spec"]["automountServiceAccountToken"]) == (False, False)


def test_without_metrics_the_operator_is_not_needed(releases: dict[str, list[Document]]) -> None:
    assert {each["kind"] for each in releases["defaults"]} == {"ConfigMap", "DaemonSet"}
    kinds = {each["kind"] for each in releases["metrics without the operator"]}
    assert "Service" in kinds
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}


def test_a_changed_configuration_restarts_the_daemons(chart: Path) -> None:
    sums = [
        one(render(chart, merged(IMAGE, {"config": {"dram": {"capacity": capacity}}})), "DaemonSet")["spec"][
            "template"
        ]["metadata"]["annotations"]
        for capacity in ("64GiB", "32GiB")
    ]
    assert sums[0] != sums[1]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"image": {"repository": ""}}, "at '/image/repository': minLength"),
        ({"image": {"tag": "0.1.0+local"}}, "at '/image/tag'"),
        ({"config": {"dram": {"capactiy": "1GiB"}}}, "at '/config/dram': additional properties 'capactiy' not allowed"),
        (
            {"config": {"server": {"socket": "/tmp/x"}}},
            "at '/config/server': additional properties 'socket' not allowed",
        ),
        ({"configuration": {}}, "additional properties 'configuration' not allowed"),
        ({"secretName": "kvpool keys"}, "'kvpool keys' does not match pattern"),
        ({"runPath": "run/kvpool"}, "at '/runPath'"),
        ({"ssdPath": "/mnt/nvme0/"}, "at '/ssdPath'"),
        ({"ssdPath": "/mnt/nvme0/../nvme1"}, "at '/ssdPath'"),
        ({"uid": 0}, "at '/uid': minimum"),
        ({"gpu": {"enabled": "yes"}}, "at '/gpu/enabled': got string, want boolean"),
        ({"resources": {"memory": None}}, "at '/resources': missing property 'memory'"),
        ({"resources": {"memory": "72GiB"}}, "at '/resources/memory': '72GiB' does not match pattern"),
        ({"resources": {"cpu": 0}}, "at '/resources/cpu': exclusiveMinimum"),
        ({"maxUnavailable": 0}, "at '/maxUnavailable'"),
    ],
)
def test_a_bad_value_is_refused_by_name(chart: Path, values: dict[str, Any], fault: str) -> None:
    assert fault in refusal(chart, merged(IMAGE, values))


def config(section: str, **options: Any) -> dict[str, Any]:
    """Values with options of a section of kvpool.toml."""
    return {"config": {section: options}}


EVENTS = "tcp://127.0.0.1:5557"
DISK = {"ssdPath": "/mnt/nvme0", **config("ssd", capacity="1TiB")}
FLEET = CASES["fleet"]
# Values that a release cannot work with, and the refusal: names, values, what was expected.
TOGETHER: list[tuple[dict[str, Any], list[str]]] = [
    (
        config("dram", capacity="1PiB"),
        ["config.dram.capacity is 1PiB, expected a size from 64KiB to 4TiB, in B, KiB, MiB, GiB or TiB"],
    ),
    (
        config("dram", capacity="72GiB"),
        ["resources.memory is 72Gi, expected room for config.dram.capacity, 72GiB, and config.dram.segment, 64MiB"],
    ),
    (
        config("dram", capacity=80 << 30, segment="1GiB"),
        [
            "resources.memory is 72Gi, expected room for config.dram.capacity, 85899345920, and config.dram.segment, 1GiB"
        ],
    ),
    (
        {"resources": {"hugepages-2Mi": "64Gi"}, **config("dram", huge_pages="hugetlb")},
        [
            "resources.hugepages-2Mi is 64Gi, expected room for config.dram.capacity, 64GiB, "
            "and config.dram.segment, 64MiB"
        ],
    ),
    (
        config("dram", huge_pages="hugetlb"),
        ["resources.hugepages-2Mi is 0, expected room for config.dram.capacity, 64GiB, and config.dram.segment, 64MiB"],
    ),
    (
        merged(FLEET, {"peer": {"port": 9471}}),
        ["peer.streamPort is 9471, expected another port than that of peer.port"],
    ),
    (
        merged(FLEET, CASES["metrics"], {"peer": {"port": 8443}}),
        ["peer.port is 8443, expected another port than that of the proxy of metrics.enabled"],
    ),
    (
        merged(CASES["metrics"], config("events", publish="tcp://127.0.0.1:9469")),
        ["config.events.publish is tcp://127.0.0.1:9469, expected another port than that of the daemon's metrics"],
    ),
    (
        config("events", publish=EVENTS, replay=EVENTS),
        [f"config.events.replay is {EVENTS}, expected another port than that of config.events.publish"],
    ),
    (
        config("server", domain_secret_file="/secrets/domain"),
        ["secretName is empty, expected a secret because config.server.domain_secret_file is /secrets/domain"],
    ),
    (
        {"peer": {"enabled": True}, **config("peer", etcd_key="/secrets/etcd.key")},
        [
            "secretName is empty, expected a secret with node.key and nodes.allow because peer.enabled is true",
            "secretName is empty, expected a secret because config.peer.etcd_key is /secrets/etcd.key",
        ],
    ),
    (
        config("server", stop_timeout="11m"),
        ["terminationGracePeriodSeconds is 660, expected more than config.server.stop_timeout, 11m"],
    ),
    (
        merged(DISK, {"terminationGracePeriodSeconds": 610}),
        [
            "terminationGracePeriodSeconds is 610, expected more than config.server.stop_timeout, 10s, "
            "and config.ssd.stop_timeout, 10m"
        ],
    ),
    (
        config("ssd", stop_timeout="600"),
        ["config.ssd.stop_timeout is 600, expected a duration with its unit, from 0s to 24h"],
    ),
    (
        {"image": {"repository": "registry.example/kvpool:1.2.3"}},
        ["image.repository is registry.example/kvpool:1.2.3, expected a name without a tag: that is image.tag"],
    ),
    (
        {"ssdPath": "/mnt/nvme0"},
        ["config.ssd.capacity is 0B, expected the size of the tier in ssdPath, /mnt/nvme0"],
    ),
    (
        config("ssd", capacity="1TiB"),
        ["ssdPath is empty, expected a directory of the node because config.ssd.capacity is 1TiB"],
    ),
    (
        config("hbm", device="cuda:0"),
        ["gpu.enabled is false, expected true because config.hbm.device is cuda:0"],
    ),
    *(
        ({"runPath": path}, [f"runPath is {path}, expected a directory of kvpool's own, such as /run/kvpool"])
        for path in ("/run", "/var/run", "/dev/shm", "/data/run", "/secrets", "/opt/kvpool", "/usr/lib/kvpool")
    ),
]


@pytest.mark.parametrize(("values", "lines"), TOGETHER)
def test_values_that_cannot_work_are_refused_with_what_was_expected(
    chart: Path, values: dict[str, Any], lines: list[str]
) -> None:
    assert refusal(chart, merged(IMAGE, values)).splitlines()[1:] == lines


def test_all_faults_of_values_are_in_one_refusal(chart: Path) -> None:
    # None of these hides another.
    values = {
        "image": {"repository": "kvpool:1"},
        "peer": {"enabled": True, "port": 9471},
        "terminationGracePeriodSeconds": 5,
        **config("dram", capacity="1PiB"),
    }
    named = [line.split(" is ")[0] for line in refusal(chart, values).splitlines()[1:]]
    assert named == [
        "image.repository",
        "config.dram.capacity",
        "terminationGracePeriodSeconds",
        "secretName",
        "peer.streamPort",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"repository": "registry.example:5000/kvpool"}},
        {"resources": {"memory": "65Gi"}},
        {"resources": {"memory": 80 << 30, "cpu": 6}},
        {"resources": {"memory": "70G"}},
        {"resources": {"memory": "1Gi", "hugepages-2Mi": "65600Mi"}, **config("dram", huge_pages="hugetlb")},
        # The daemon takes what there is not.
        config("dram", capacity="100GiB", allow_overcommit=True),
        # There is nothing to write down.
        {"terminationGracePeriodSeconds": 11},
        merged(DISK, {"terminationGracePeriodSeconds": 11}, config("ssd", stop_timeout="500ms")),
        # One is the pod's own address, the other the loopback.
        merged(FLEET, config("events", publish="tcp://127.0.0.1:9470")),
        config("events", publish="tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0"),
        # A name of the daemon's own folder, which is mounted.
        config("server", domain_secret_file="/run/kvpool/domain"),
    ],
)
def test_values_that_can_work_are_taken(chart: Path, values: dict[str, Any]) -> None:
    assert render(chart, merged(IMAGE, values))


def test_the_values_of_the_page_are_taken(chart: Path, tmp_path: Path) -> None:
    page = (TREE / "docs/operations.md").read_text().partition("\n## Containers\n")[2]
    values = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    documents = render(chart, values)
    assert faults(documents, KUBERNETES[1]) == []
    config = config_of(documents, tmp_path)
    limits = daemon_of(documents)["resources"]["limits"]
    # As the page counts it.
    dram, ssd = config.dram.capacity, config.ssd.capacity
    needed = (
        dram + config.dram.segment + (230 + 64) * (dram >> 15) + dram // 16 + 250 * (ssd >> 18) + (16 + 16 + 512 << 20)
    )
    assert needed <= parse_size(limits["memory"] + "B") <= 1.05 * needed


def test_every_value_is_used_documented_and_in_the_schema(chart: Path) -> None:
    defaults, schema, _ = ask(DEFAULTS, str(chart))
    names = set(leaves(defaults))
    assert names == set(OTHERS)
    # With everything on and something of everything, each value changes what is made.
    everything = merged(
        IMAGE,
        DISK,
        {
            "secretName": "kvpool-keys",
            "gpu": {"enabled": True},
            "peer": {"enabled": True},
            "metrics": {"enabled": True},
        },
    )
    changed = {
        name: (
            merged(everything, at(name, not other)) if isinstance(other, bool) else everything,
            merged(everything, at(name, other)),
        )
        for name, other in OTHERS.items()
    }
    made = render_all(chart, [values for pair in changed.values() for values in pair])
    assert [name for name, before, after in zip(changed, made[::2], made[1::2], strict=True) if before == after] == []
    lines = (SOURCE / "values.yaml").read_text().splitlines()
    documented = {}
    path: list[tuple[int, str]] = []
    for before, line in pairwise(lines):
        if found := re.match(r"( *)([A-Za-z./]+):", line):
            path = [*(step for step in path if step[0] < len(found.group(1))), (len(found.group(1)), found.group(2))]
            documented[".".join(key for _, key in path)] = before.lstrip().startswith("# ")
    for name in names:
        parts = name.split(".")
        assert any(documented.get(".".join(parts[:length])) for length in range(len(parts), 0, -1)), (
            f"{name} is not documented"
        )
    assert _names_of(schema) >= {
        name for name in names if not name.startswith(("config.", "nodeSelector.", "resources.", "metrics.resources."))
    } - {"metrics.dashboard.labels.grafana_dashboard"}


def _names_of(schema: Mapping[str, Any]) -> set[str]:
    """The names of values that a schema has."""

    def below(part: Mapping[str, Any], above: str) -> Iterator[str]:
        for key, value in part.get("properties", {}).items():
            yield above + key
            resolved = schema["$defs"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value
            yield from below(resolved, f"{above}{key}.")

    return set(below(schema, ""))


def test_the_archive_has_the_trees_files_and_version(built: Callable[[str], Path], chart: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(chart, tmp_path, "gztar")
    for name in ("kvpool-alerts.yml", "grafana-dashboard.json", "kvpool.toml"):
        assert (tmp_path / "kvpool/files" / name).read_bytes() == (TREE / "configs" / name).read_bytes()
        assert not list(SOURCE.rglob(name)), "a copy kept by hand"
    for file in SOURCE.rglob("*"):
        if file.is_file() and file.name not in ("Chart.yaml", "values.schema.json"):
            assert (tmp_path / "kvpool" / file.relative_to(SOURCE)).read_bytes() == file.read_bytes()
    _, _, metadata = ask(DEFAULTS, str(chart))
    assert metadata["appVersion"] == built("kvpool-*-cp311-cp311-*_x86_64.whl").name.split("-")[1]
    assert chart.name == f"kvpool-{metadata['version']}.tgz"


def test_the_same_tree_makes_the_same_chart(chart: Path) -> None:
    before = chart.read_bytes()
    subprocess.run(["scripts/make-chart", sys.executable, str(tool("python"))], cwd=TREE, check=True, timeout=120)
    assert chart.read_bytes() == before
