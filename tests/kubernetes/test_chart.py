"""The chart, rendered by Helm: what it says agrees with the
schemas, with itself and with the services.
"""

from __future__ import annotations

from typing import Any

import pytest

from foretoken import __version__, cli
from foretoken.commands.settings_command import SettingsCommand
from foretoken.config import Settings
from tests.kubernetes.chart import (
    CASES,
    CHART,
    LEAST,
    POOL,
    Manifest,
    check_schema,
    containers,
    merged,
    of_kind,
    pods,
    render,
)

pytestmark = pytest.mark.kubernetes
GATEWAY, VERIFIER = "foretoken.gateway.v1.GatewayService", "foretoken.verifier.v1.VerifierService"
SERVICES = ("gateway", "verifier", "drafter")


@pytest.fixture(params=CASES)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(CASES[request.param])


def settings(container: Manifest) -> Settings:
    """Return the settings that a container's command line means, as the service reads it."""
    from drafter_svc.config import DrafterSettings
    from foretoken.commands.stack_drafters import drafters_of_verifier
    from gateway.config import GatewaySettings
    from verifier_svc.config import VerifierSettings

    name, *words = container["args"]
    command = cli.app.commands[name]
    assert isinstance(command, SettingsCommand)
    with command.make_context(name, [word.replace("$(POD_IP)", "10.0.0.1") for word in words]) as context:
        given = command.given(context)
    if name == "verifier":
        return given.settings(VerifierSettings, drafters=drafters_of_verifier(given)[0])
    return given.settings({"gateway": GatewaySettings, "drafter": DrafterSettings}[name])


def test_every_manifest_is_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        check_schema(manifest)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))


def test_a_field_that_no_schema_knows_is_found() -> None:
    """The checks above can fail: Kubernetes ignores a misspelt field without a word."""
    for case, kind in (("least", "Deployment"), ("pool", "InferencePool")):
        (manifest, *_) = of_kind(render(CASES[case]), kind)
        manifest["spec"]["replica"] = 3
        with pytest.raises(Exception, match="replica"):
            check_schema(manifest)


def test_helm_finds_nothing_to_warn_of() -> None:
    from helm_python.chart import lint

    for values in CASES.values():
        report = lint(CHART, values, strict=True, kube_version="v1.34.0")
        assert not report["errors"] and all(message["severity"] < 2 for message in report["messages"]), report


def test_it_deploys_this_version() -> None:
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == __version__
        # Every value is in the schema, and the schema knows no other.
        assert chart.schema is not None
        assert chart.schema["properties"].keys() - {"global"} == chart.values.keys()


def test_command_lines_are_what_the_services_take(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        for container in containers(pod).values():
            if "args" in container:
                assert settings(container)


def test_services_find_each_other(manifests: list[Manifest]) -> None:
    of = {component: pod for component, pod in pods(manifests)}
    parts = containers(of["verifier"])
    verifier = settings(parts["verifier"])
    drafters = {settings(part).address for name, part in parts.items() if name.startswith("drafter-")}
    assert {endpoint.address for endpoint in verifier.drafters} == drafters
    gateway = settings(parts["gateway"] if "gateway" in parts else containers(of["gateway"])["gateway"])
    if "gateway" in parts:
        assert gateway.verifiers == (verifier.address,)
        return
    assert verifier.address == "0.0.0.0:50052"
    (service,) = [each for each in of_kind(manifests, "Service") if each["spec"].get("clusterIP") == "None"]
    host = f"{service['metadata']['name']}.ns.svc"
    (port,) = service["spec"]["ports"]
    by_address = f"dns://{host}:{port['port']}"
    by_name = f"dns+srv://_{port['name']}._tcp.{host}"
    assert gateway.verifiers == (by_name if verifier.link_certfile else by_address,)
    assert service["spec"]["publishNotReadyAddresses"]


def test_a_pod_has_time_for_its_drain(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        needed = 0.0
        for name, container in containers(pod).items():
            if name in ("gateway", "verifier"):
                wait = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
                needed += wait + settings(container).drain_timeout_s
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed + 10


def test_a_verifier_outlives_what_drains_through_it_and_drafters_outlive_it(manifests: list[Manifest]) -> None:
    """Kubernetes ends sidecars after the pod's own containers, the last one first."""
    for _, pod in pods(manifests):
        order = [each["name"] for each in pod["spec"].get("initContainers", []) if each.get("restartPolicy")]
        order += [each["name"] for each in pod["spec"]["containers"]]
        places = [name for name in order if name in ("verifier", "gateway")]
        assert places == [name for name in ("verifier", "gateway") if name in places]
        assert all(order.index(name) < order.index("verifier") for name in order if name.startswith("drafter-"))


def test_probes_ask_what_the_services_answer(manifests: list[Manifest]) -> None:
    expected = {"gateway": GATEWAY, "verifier": VERIFIER}
    for _, pod in pods(manifests):
        for name, container in containers(pod).items():
            if name not in expected:
                assert "readinessProbe" not in container, "a drafter must not take its verifier away"
                continue
            flags = settings(container)
            port = flags.grpc_port if name == "gateway" else 50052
            for kind, service in (("liveness", ""), ("readiness", expected[name])):
                probe = container[f"{kind}Probe"]
                if "grpc" in probe:
                    assert (probe["grpc"]["port"], probe["grpc"].get("service", "")) == (port, service)
                    # Kubernetes' gRPC probe speaks plain text alone.
                    assert not (flags.ssl_certfile if name == "gateway" else flags.link_certfile)
                elif "exec" in probe:
                    words = probe["exec"]["command"]
                    at = flags.address if flags.address.startswith("unix:") else "localhost:50052"
                    assert words[:3] == ["foretoken", "probe", at]
                    assert [word for word in words if word.startswith("--service")] == (
                        [f"--service={service}"] if service else []
                    )
                    assert any(word.startswith("--link-certfile") for word in words) == bool(flags.link_certfile)
                    cli.app.commands["probe"].make_context("probe", words[2:])
                else:
                    assert probe["httpGet"]["scheme"] == "HTTPS" and flags.ssl_certfile
            start = container["startupProbe"]
            assert start["periodSeconds"] * start["failureThreshold"] >= (1800 if name == "verifier" else 60)


def test_ports_are_those_that_the_services_open(manifests: list[Manifest]) -> None:
    opened: dict[str, set[int]] = {}
    for component, pod in pods(manifests):
        opened[component] = set()
        for name, container in containers(pod).items():
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            opened[component] |= set(ports.values())
            if name == "gateway":
                flags = settings(container)
                assert ports == {"http": flags.port, "grpc": flags.grpc_port}
            if name == "verifier":
                flags = settings(container)
                own = {"kv-events": flags.kv_events, "kv-replay": flags.kv_events_replay, "verifier": flags.address}
                assert ports == {
                    key: int(address.rpartition(":")[2])
                    for key, address in own.items()
                    if address and not address.startswith("unix:")
                }
    for policy in of_kind(manifests, "NetworkPolicy"):
        component = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= opened[component]
            assert rule.get("from") or component == "gateway"


def test_selectors_choose_their_pods(manifests: list[Manifest]) -> None:
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(manifests)}
    for manifest in manifests:
        spec = manifest["spec"]
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        chosen = [component for component, own in labels.items() if wanted.items() <= own.items()]
        component = manifest["metadata"]["labels"].get("app.kubernetes.io/component", "verifier")
        assert chosen == [component], manifest["metadata"]["name"]
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        names = [each["metadata"]["name"] for each in of_kind(manifests, "Deployment")]
        assert scaler["spec"]["scaleTargetRef"]["name"] in names


def test_mounts_are_there_and_secrets_are_only_named(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "Secret") and not of_kind(manifests, "ConfigMap")
    for _, pod in pods(manifests):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        used = set()
        for container in containers(pod).values():
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths))
            used |= {mount["name"] for mount in container.get("volumeMounts", [])}
            # What a flag names lies in a folder that is mounted.
            for word in container.get("args", []):
                path = word.partition("=")[2].removeprefix("unix:")
                if path.startswith(("/etc/", "/run/", "/model")):
                    assert any(path.startswith(folder) for folder in paths), word
        assert used == volumes.keys()
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in volumes.values() if "secret" in volume)
        assert volumes["sockets"]["emptyDir"]["medium"] == "Memory" if "sockets" in volumes else True


def test_containers_have_no_rights(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["runAsUser"] == 10001
        for container in containers(pod).values():
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_claimed_gpu_is_shared_by_the_verifier_its_drafters_and_mps() -> None:
    manifests = render(CASES["everything"])
    (template,) = of_kind(manifests, "ResourceClaimTemplate")
    pod = dict(pods(manifests))["verifier"]
    assert pod["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    parts = containers(pod)
    claimed = {name for name, each in parts.items() if each.get("resources", {}).get("claims")}
    assert claimed == {"verifier", "drafter-eagle", "mps"}
    for name in claimed:
        mounts = {mount["name"] for mount in parts[name]["volumeMounts"]}
        assert {"mps", "shm"} <= mounts
        assert {entry["name"] for entry in parts[name]["env"]} >= {"CUDA_MPS_PIPE_DIRECTORY"}
    assert settings(parts["verifier"]).device == "cuda"


def test_a_gpu_of_one_container_is_the_verifiers() -> None:
    parts = containers(dict(pods(render(CASES["a GPU of one container"])))["verifier"])
    assert parts["verifier"]["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 1}
    assert "--drafter=name=eagle,algorithm=EAGLE3,model=/model/head" in parts["verifier"]["args"]
    assert "drafter-eagle" not in parts and "drafter-ngram" in parts


def test_llm_ds_router_finds_its_pods() -> None:
    manifests = render(POOL)
    (pool,) = of_kind(manifests, "InferencePool")
    pod = dict(pods(manifests))["verifier"]
    labels = pod["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == "vllm" and labels["llm-d.ai/guide"] == "foretoken"
    assert pool["spec"]["targetPorts"] == [{"number": settings(containers(pod)["gateway"]).port}]
    verifier = settings(containers(pod)["verifier"])
    assert verifier.kv_events_topic == "kv@10.0.0.1:8000@tiny"
    readers = {
        port["port"]: rule["from"]
        for rule in of_kind(manifests, "NetworkPolicy")[0]["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert readers[5557] == readers[5558] == POOL["networkPolicy"]["kvEventReaders"]
    assert readers[8000] == POOL["networkPolicy"]["clients"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model.name"),
        ({"model": {"name": "m"}}, "model.volume"),
        (merged(LEAST, {"access": {"keysSecret": ""}}), "without a key"),
        (merged(LEAST, {"access": {"clientCertificates": True}}), "needs access.tlsSecret"),
        (merged(LEAST, {"links": {"tokenSecret": ""}}), "meet over TCP"),
        (merged(LEAST, {"gpu": {"mps": True}}), "gpu.mode: claim"),
        (merged(LEAST, {"gpu": {"mode": "container"}, "drafters": [dict(CASES["everything"]["drafters"][0])]}), "GPU"),
        (
            merged(LEAST, {"drafters": [{**CASES["everything"]["drafters"][0], "placement": "in-process"}]}),
            "runs in the verifier",
        ),
        (merged(POOL, {"access": {"keysSecret": "keys"}}), "check clients at the router"),
        (merged(POOL, {"access": {"tlsSecret": "tls"}}), "router ends TLS"),
        (merged(POOL, {"networkPolicy": {"clients": []}}), "networkPolicy.clients"),
        (merged(POOL, {"inferencePool": {"endpointPicker": {"name": ""}}}), "endpointPicker.name"),
        (merged(LEAST, {"gateway": {"replica": 3}}), "replica"),
        (merged(LEAST, {"routing": "both"}), "routing"),
        (merged(LEAST, {"model": {"path": "/absolute"}}), "path"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        render(values)
