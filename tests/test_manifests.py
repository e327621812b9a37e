"""What deploy/ has for systemd, containers and Kubernetes fits the node: options, ports, paths, users, schemas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from penstock.cli.main import parse
from penstock.node.config import Config, load_config
from penstock.node.exposure import check_exposure
from tests.containerfile import ROOT, last_of, stages, variables
from tests.waiting import PROCESS_S

UNIT = ROOT / "deploy" / "systemd" / "penstock.service"
KUBERNETES = ROOT / "deploy" / "kubernetes"
OPTIONS = KUBERNETES / "penstock.toml"
KUSTOMIZATION = KUBERNETES / "kustomization.yaml"
VERSIONS = ("1.31", "1.35")
"""Versions of Kubernetes by whose schemas the manifests are valid."""


def manifests() -> Iterator[dict[str, Any]]:
    """Yield the objects in the manifests."""
    for name in yaml.safe_load(KUSTOMIZATION.read_text("utf-8"))["resources"]:
        yield from yaml.safe_load_all((KUBERNETES / name).read_text("utf-8"))


def one(kind: str) -> dict[str, Any]:
    (found,) = (each for each in manifests() if each["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = one("StatefulSet")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def options() -> Config:
    """Return what a node in the pod has as options."""
    return load_config(OPTIONS, environment=variables())


def test_the_variables_of_the_image_and_of_the_service_name_options() -> None:
    assert load_config(environment=variables()).data_dir == Path(last_of("VOLUME").text)
    (set_by_unit,) = re.findall(r"^Environment=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert load_config(environment=dict([set_by_unit.replace("%S", "/var/lib").split("=", 1)])).data_dir.name == "penstock"


def test_the_build_of_the_image_gets_the_files_that_it_copies() -> None:
    kept = re.findall(r"^!(.*)$", (ROOT / ".containerignore").read_text("utf-8"), re.MULTILINE)
    copied = [name for each in stages()[0] if each.name == "COPY" for name in each.text.split()[:-1]]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_the_commands_of_image_service_and_pod_have_arguments_that_exist() -> None:
    (started,) = re.findall(r"^ExecStart=\S+/penstock (.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    for arguments in (started.split(), last_of("CMD").command(), container()["args"]):
        assert callable(parse(arguments).run)


def test_the_options_of_the_pod_open_nothing_to_strangers() -> None:
    check_exposure(options())


def test_the_pod_exposes_the_ports_on_which_the_node_listens() -> None:
    config = options()
    listening = {each.listen.port for each in config.mqtt.all_listeners} | {config.pop.listen.port, config.admin.listen.port}
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert set(ports.values()) == listening
    assert {int(port) for port in last_of("EXPOSE").text.split()} < listening
    for service in (each for each in manifests() if each["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ports[container()[probe]["httpGet"]["port"]] == config.admin.listen.port


def test_the_pod_mounts_what_the_options_name() -> None:
    config = options()
    mounts = {each["mountPath"]: each["name"] for each in container()["volumeMounts"]}
    claims = one("StatefulSet")["spec"]["volumeClaimTemplates"]
    volumes = {each["name"] for each in (*pod()["volumes"], *(claim["metadata"] for claim in claims))}
    assert set(mounts.values()) == volumes
    assert str(config.data_dir) in mounts
    tls = config.mqtt.listeners[0]
    named = (tls.certificate_file, tls.key_file, config.pop.certificate_file, config.access.file, config.access.password_file)
    assert {str(Path(path).parent) for path in named} < set(mounts)
    assert container()["args"][-1] in mounts


def test_the_pod_runs_as_the_user_of_the_image() -> None:
    user, group = (int(part) for part in last_of("USER").text.split(":"))
    context = pod()["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)


def test_the_selectors_find_the_pod() -> None:
    labels = one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    chosen = [each["spec"]["selector"] for each in manifests() if "selector" in each.get("spec", ())]
    assert len(chosen) == 5
    assert all(each.get("matchLabels", each) == labels for each in chosen)


def test_the_node_has_time_to_end_in_order() -> None:
    command = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert pod()["terminationGracePeriodSeconds"] >= int(command[1]) + options().drain_ms / 1000 + 60


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid_by_the_schemas_of_kubernetes(version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for manifest in manifests():
        assert schemas.validate(manifest, version, strict=True) == version
    wrong = replace_in(one("StatefulSet"), "terminationGracePeriodSeconds", "gracePeriod")
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, version, strict=True)


def replace_in(manifest: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a manifest with another key."""
    changed: dict[str, Any] = json.loads(json.dumps(manifest).replace(f'"{old}"', f'"{new}"'))
    return changed


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_names_the_image_and_the_options() -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert ended.returncode == 0, ended.stderr
    built = list(yaml.safe_load_all(ended.stdout))
    (stateful,) = (each for each in built if each["kind"] == "StatefulSet")
    (configured,) = (each for each in built if each["kind"] == "ConfigMap")
    spec = stateful["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"].startswith("registry.example.org/penstock:")
    assert configured["data"][OPTIONS.name] == OPTIONS.read_text("utf-8")
    assert configured["metadata"]["name"] in {each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each}
