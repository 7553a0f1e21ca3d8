"""The files in deploy/: parsed, checked by the tools that will read them, and compared with the program."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from leasehold.cli.serve import serve
from leasehold.server.app import ROUTES
from leasehold.server.settings import CONFIG_VARIABLE, SETTINGS, read
from tests.support.program import PROGRAM
from tests.support.running_server import running

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "leasehold.service"
CONTAINER = DEPLOY / "container" / "Containerfile"
COMPOSE = DEPLOY / "compose"
KUBERNETES = DEPLOY / "kubernetes"
FLAGS = {flag for param in serve.params if isinstance(param, click.Option) for flag in param.opts}
MANIFESTS = [path for path in sorted(KUBERNETES.glob("*.yaml")) if path.name != "kustomization.yaml"]


def documents():
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text()) if "kind" in found]


def manifest(kind):
    (found,) = [each for each in documents() if each["kind"] == kind]
    return found


def pod():
    return manifest("Deployment")["spec"]["template"]["spec"]


def container():
    (found,) = pod()["containers"]
    return found


def assert_flags(arguments):
    assert {argument for argument in arguments if argument.startswith("-")} <= FLAGS


@pytest.mark.parametrize("path", [path for path in DEPLOY.rglob("*") if path.is_file()], ids=lambda path: path.name)
def test_variables_in_deployed_files_exist(path):
    known = {setting.variable for setting in SETTINGS} | {CONFIG_VARIABLE}
    assert set(re.findall(r"LEASEHOLD_SERVE_\w+", path.read_text())) <= known


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: path.parent.name)
def test_configuration_file_is_valid_and_authenticates(path):
    settings = read({}, {}, path)
    assert settings.authenticates
    assert settings.tls is not None
    assert settings.warnings() == []


# -- systemd


def unit():
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def installed_unit(tmp_path):
    """The unit with programs that exist here: systemd-analyze looks for them."""
    found = tmp_path / UNIT.name
    found.write_text(re.sub(r"(?m)^(Exec\w+)=\S+", r"\1=/bin/true", UNIT.read_text()))
    return found


def analyze(*arguments):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_unit_is_accepted_by_systemd(tmp_path):
    done = analyze("verify", "--man=no", installed_unit(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_is_hardened(tmp_path):
    done = analyze("security", "--offline=true", "--threshold=20", installed_unit(tmp_path))
    assert done.returncode == 0, done.stdout


def test_unit_calls_the_program_with_its_flags():
    service = unit()
    for line in (service["ExecStart"], service["ExecStartPre"]):
        program, command, *arguments = shlex.split(line)
        assert (Path(program).name, command) == ("leasehold", "serve")
        assert_flags(arguments)
    assert "--check" in service["ExecStartPre"]
    assert "-HUP" in service["ExecReload"]


def test_unit_leaves_time_to_drain_and_room_for_connections():
    service, settings = unit(), read({}, {}, UNIT.with_name("serve.toml"))
    assert int(service["TimeoutStopSec"]) > max(10.0, settings.call_timeout + 5)
    assert int(service["LimitNOFILE"]) > 2 * settings.limits.connections


# -- the container file


def instructions():
    text = re.sub(r"(?m)^#.*\n", "", CONTAINER.read_text()).replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


def test_container_runs_the_program_as_its_own_user():
    found = dict(instructions())
    assert found["ENTRYPOINT"] == '["leasehold", "serve"]'
    assert found["USER"] == f"{pod()['securityContext']['runAsUser']}:{pod()['securityContext']['runAsGroup']}"
    assert found["EXPOSE"] == "7420"
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert "LEASEHOLD_SERVE_LISTEN=0.0.0.0:7420" in found["ENV"]


def test_container_installs_extras_that_exist():
    extras = re.search(r"\$\{wheel\}\[([a-z,]+)\]", CONTAINER.read_text())[1].split(",")
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert "server" in extras
    for extra in extras:
        assert re.search(rf"(?m)^{extra} = \[", project)


# -- compose


def compose():
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def test_compose_services_are_hardened_and_refer_to_what_exists():
    found = compose()
    services = found["services"]
    assert set(services) == {"etcd", "leasehold", "prometheus"}
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert set(service["networks"]) <= set(found["networks"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            ignored = (COMPOSE / ".gitignore").read_text().split()
            named = source in found["volumes"] or source.removeprefix("./") in ignored
            assert named or (COMPOSE / source).exists(), source
    build = services["leasehold"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == CONTAINER


def test_compose_starts_the_server_as_the_image_expects():
    server = compose()["services"]["leasehold"]
    image = dict(instructions())
    assert (server["user"], server["stop_signal"]) == (image["USER"], image["STOPSIGNAL"])
    assert int(server["stop_grace_period"].removesuffix("s")) >= pod()["terminationGracePeriodSeconds"] // 2
    assert_flags(server["command"])
    assert set(server["environment"]) <= {setting.variable for setting in SETTINGS}


def test_compose_health_check_follows_the_server():
    kind, *command = compose()["services"]["leasehold"]["healthcheck"]["test"]
    assert (kind, command[0]) == ("CMD", "python")

    def exit_code(port: int) -> int:
        program = command[-1].replace("7420", str(port))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
        return done.returncode

    with running() as server:
        assert exit_code(server.port) == 0
    assert exit_code(server.port) == 1


def test_compose_gives_prometheus_a_valid_configuration(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed here")
    text = (COMPOSE / "prometheus.yml").read_text().replace("/etc/prometheus", str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / "metrics.key").write_text("key")
    alerts = subprocess.run([*PROGRAM, "alerts"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "leasehold-alerts.yml").write_text(alerts)
    checked = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert re.search(r"SUCCESS: \d\d+ rules found", checked.stdout)


def test_compose_etcd_options_exist():
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed here")
    known = subprocess.run(["etcd", "--help"], capture_output=True, text=True, check=False)
    for option in compose()["services"]["etcd"]["command"]:
        assert f"{option.partition('=')[0]} " in known.stdout + known.stderr


# -- Kubernetes


def test_kustomization_contains_every_manifest_and_builds():
    found = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    kinds = [path.name for path in MANIFESTS if "kind: " in path.read_text()]
    assert sorted(found["resources"]) == sorted(kinds)
    if shutil.which("kubectl") is None:
        return
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    built = list(yaml.safe_load_all(done.stdout))
    labels = {"app.kubernetes.io/name": "leasehold"}
    for each in built:
        spec = each.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector is not None:
                assert selector.get("matchLabels", selector) == labels, each["kind"]
        assert each["metadata"].get("namespace", "leasehold") == "leasehold"
    (policy,) = [each for each in built if each["kind"] == "NetworkPolicy"]
    callers = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert callers == {"leasehold.dev/client": "true"}
    (deployment,) = [each for each in built if each["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["metadata"]["labels"] == labels


def test_pod_serves_with_flags_and_probes_that_exist():
    assert_flags(container()["args"])
    for probe in ("readinessProbe", "livenessProbe"):
        request = container()[probe]["httpGet"]
        assert "GET" in ROUTES[request["path"]]
        assert request["scheme"] == "HTTPS"
    assert container()["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container()["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_pod_drains_before_it_is_killed():
    settings = read({}, {}, KUBERNETES / "serve.toml")
    command, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod()["terminationGracePeriodSeconds"] > int(seconds) + max(10.0, settings.call_timeout + 5)
    assert manifest("Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_pod_mounts_every_file_of_its_configuration():
    settings = read({}, {}, KUBERNETES / "serve.toml")
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert set(mounts) == set(volumes)
    assert settings.keys == mounts["keys"] / "keys.toml"
    assert {settings.tls.cert, settings.tls.key} == {mounts["tls"] / "tls.crt", mounts["tls"] / "tls.key"}
    assert container()["args"] == ["--config", str(mounts["config"] / "serve.toml")]
    assert not any("subPath" in mount for mount in container()["volumeMounts"]), "it would never change"


def test_pod_has_no_rights_that_it_does_not_need():
    security = container()["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["enableServiceLinks"] is False


def test_autoscaling_follows_a_metric_that_the_server_has():
    scaler = manifest("HorizontalPodAutoscaler")["spec"]
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    pods = scaler["metrics"][0]["pods"]
    assert pods["metric"]["name"] == rule["name"]["as"]
    series = re.match(r'(\w+)\{kind="(\w+)"', rule["seriesQuery"])
    assert series[0] in rule["metricsQuery"]
    with running() as server:
        assert f'{series[1]}{{kind="{series[2]}"}}' in server.get("/metrics").body.decode()
    waiters = read({}, {}, KUBERNETES / "serve.toml").limits.waiters
    assert int(pods["target"]["averageValue"]) == 0.7 * waiters
    assert scaler["scaleTargetRef"]["name"] == manifest("Deployment")["metadata"]["name"]


def test_ports_of_pod_service_and_policy_agree():
    (port,) = container()["ports"]
    (service,) = manifest("Service")["spec"]["ports"]
    (policy,) = manifest("NetworkPolicy")["spec"]["ingress"][0]["ports"]
    assert service["targetPort"] == policy["port"] == port["name"]
    assert service["port"] == port["containerPort"] == 7420
