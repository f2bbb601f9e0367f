"""The files under `conductor/deploy`, held against the schemas of those who will read them.

Kubernetes objects and pod templates are checked with the API's own schemas, KubeRay's with the fields of its v1 types, and
whatever they say about Conductor with Conductor: configuration, commands, ports, labels.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kubernetes_validate

from conductor.config import Config, load

DEPLOY = Path(__file__).parents[2] / "conductor" / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kuberay-*.yaml"))
KUBERNETES = "1.34"

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
START_PARAMS = TEXTS | {"propertyNames": {"not": {"const": "labels"}}}  # the operator wants them beside, not here
COUNT = {"type": "integer", "minimum": 0}


def strict(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


WORKER_GROUP = strict(
    ["groupName", "rayStartParams", "template", "minReplicas", "maxReplicas"],
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    idleTimeoutSeconds=COUNT,
    labels=TEXTS,
    rayStartParams=START_PARAMS,
    template={"type": "object"},
)
HEAD_GROUP = strict(
    ["rayStartParams", "template"],
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    enableIngress={"type": "boolean"},
    labels=TEXTS,
    rayStartParams=START_PARAMS,
    template={"type": "object"},
)
RAY_CLUSTER = strict(
    ["headGroupSpec"],
    rayVersion={"type": "string"},
    authOptions=strict(["mode"], mode={"enum": ["token", "disabled"]}),
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=HEAD_GROUP,
    workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
)
RAY_JOB = strict(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=strict(
        ["entrypoint", "rayClusterSpec"],
        entrypoint={"type": "string"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        runtimeEnvYAML={"type": "string"},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=RAY_CLUSTER,
    ),
)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def pod_templates(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def pair(labels: dict[str, str]) -> str:
    """One label as the configuration writes it."""
    ((name, value),) = labels.items()
    return f"{name}={value}"


def serving() -> tuple[Config, dict[str, Any], list[dict[str, Any]]]:
    """Configuration, job and services of the serving manifest."""
    config_map, job, *services = documents(DEPLOY / "kuberay-serve.yaml")
    file = yaml.safe_load(config_map["data"]["conductor.yaml"])
    flat = {f"{section}.{key}": value for section, values in file.items() for key, value in values.items()}
    admin_key = {"gateway.admin_key": "sha256:" + "0" * 64}  # from the secret
    return load(None, {}, flat | admin_key).config, job, services


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_object_fits_its_schema(path: Path) -> None:
    for document in documents(path):
        if document["kind"] == "RayJob":
            jsonschema.validate(document, RAY_JOB)
            for template in pod_templates(document):
                pod = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": "x"} | template.get("metadata", {}),
                    "spec": template["spec"],
                }
                kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_a_schema_that_refuses_nothing_would_prove_nothing() -> None:
    """A field misspelled anywhere is found."""
    (job,) = documents(DEPLOY / "kuberay-compare.yaml")
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, RAY_JOB)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "imge": "x"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_configuration_inside_is_valid_and_matches_what_is_around_it() -> None:
    """Every label that a worker asks for is carried by a group with enough pods; ports and mounted files exist."""
    config, job, services = serving()
    cluster = job["spec"]["rayClusterSpec"]
    groups = {pair(group["labels"]): group for group in cluster["workerGroupSpecs"]}
    for labels, count in (
        (config.workers.prefill_labels, config.workers.prefill),
        (config.workers.decode_labels, config.workers.decode),
    ):
        assert groups[labels[0]]["replicas"] >= count
    assert (pair(cluster["headGroupSpec"]["labels"]),) == config.cluster.conductor_labels
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert (ports["gateway"], ports["admin"]) == (config.gateway.port, config.gateway.admin_port)
    assert [service["spec"]["ports"][0]["targetPort"] for service in services] == ["gateway", "admin"]
    head_labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"].items()
    assert all(service["spec"]["selector"].items() <= head_labels for service in services)
    mounts = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert config.gateway.keys_file is not None
    assert str(config.gateway.keys_file.parent) in mounts


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_commands_inside_exist(path: Path) -> None:
    """Every option that an entrypoint gives is one of its command's."""
    (job,) = [document for document in documents(path) if document["kind"] == "RayJob"]
    _, _, module, command, *rest = shlex.split(job["spec"]["entrypoint"])
    shown = subprocess.run([sys.executable, "-m", module, command, "--help"], capture_output=True, text=True, check=True).stdout
    options = [word for word in rest if word.startswith("--")]
    assert options
    assert [option for option in options if option not in shown] == []


def test_versions_are_those_that_are_tested() -> None:
    constraints = (DEPLOY.parents[1] / "constraints.txt").read_text()
    (ray_version,) = re.findall(r"^ray==(.+)$", constraints, flags=re.M)
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] == "RayJob":
                assert document["spec"]["rayClusterSpec"]["rayVersion"] == ray_version


def test_the_dockerfile_passes_its_linter_and_copies_what_there_is() -> None:
    """Every package and file that it copies exists, and it ends as a user without rights."""
    path = DEPLOY / "Dockerfile"
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(linter), str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    text = path.read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, flags=re.M) for name in line.split()]
    assert copied
    assert [name for name in copied if not (DEPLOY.parents[1] / name).exists()] == []
    assert re.findall(r"^USER (\d+):\d+$", text, flags=re.M)[-1] != "0"
