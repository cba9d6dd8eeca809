"""scripts/deploy/mooncake-groups.yaml and mooncake-gateway.yaml: they fit their schemas, and a pod does what it says.

Kubernetes' own schemas judge the pods. Those of the extensions are below, for the fields that the manifests use,
written from the extensions' documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.config.flags import parse
from tests.lab.test_deploy import KUBERNETES, pod_script, slept

FOLDER = Path(__file__).resolve().parents[3] / "scripts/deploy"
MANIFESTS = [
    one
    for name in ("mooncake-groups.yaml", "mooncake-gateway.yaml")
    for one in yaml.safe_load_all((FOLDER / name).read_text())
]


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """The schema of an object that has no other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT = {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
SPECS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        networkConfig=fields("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
        leaderWorkerTemplate=fields(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): fields(
        "selector targetPorts endpointPickerRef",
        selector=fields("matchLabels", matchLabels=LABELS),
        targetPorts={"type": "array", "items": fields("number", number=PORT), "minItems": 1, "maxItems": 8},
        endpointPickerRef=fields(
            "name",
            group={"type": "string"},
            kind={"type": "string"},
            name=NAME,
            port=fields("number", number=PORT),
            failureMode=one_of("FailOpen", "FailClose"),
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): fields(
        parentRefs={"type": "array", "items": fields("name", name=NAME)},
        rules={
            "type": "array",
            "items": fields(
                matches={
                    "type": "array",
                    "items": fields(
                        path=fields(
                            type=one_of("Exact", "PathPrefix", "RegularExpression"),
                            value={"type": "string", "pattern": "^/"},
                        )
                    ),
                },
                backendRefs={
                    "type": "array",
                    "items": fields("name", group={"type": "string"}, kind={"type": "string"}, name=NAME, port=PORT),
                },
                timeouts=fields(request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
            ),
        },
    ),
}


def of(kind: str) -> dict[str, Any]:
    (found,) = (one for one in MANIFESTS if one["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    return of("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["workerTemplate"]


@pytest.mark.parametrize("kind", [kind for _, kind in SPECS])
def test_the_extensions_fields_exist(kind):
    manifest = of(kind)
    schema = SPECS[manifest["apiVersion"], kind]
    jsonschema.validate(manifest["spec"], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest["spec"] | {"no-such-field": 1}, schema)


@pytest.mark.parametrize("release", KUBERNETES)
def test_the_pod_and_the_service_fit_kubernetes_schemas(release):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(of("Service"), release, strict=True)
    as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod()["metadata"]}, "spec": pod()["spec"]}
    kubernetes_validate.validate(as_pod, release, strict=True)


def test_the_manifests_fit_together():
    pool, (rule,) = of("InferencePool"), of("HTTPRoute")["spec"]["rules"]
    assert [ref["name"] for ref in rule["backendRefs"]] == [pool["metadata"]["name"]]
    stateful = next(
        one for one in yaml.safe_load_all((FOLDER / "mooncake.yaml").read_text()) if one["kind"] == "StatefulSet"
    )
    assert pool["spec"]["selector"]["matchLabels"] == stateful["spec"]["template"]["metadata"]["labels"]
    assert of("Service")["spec"]["selector"] == pod()["metadata"]["labels"]
    (node,) = pod()["spec"]["containers"]
    assert {mount["name"] for mount in node["volumeMounts"]} == {volume["name"] for volume in pod()["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("index", "size", "more", "role", "join", "tries"),
    [
        (0, 4, {"PODS": "10.1.0.5"}, "prefill", None, 0),
        (0, 4, {}, "prefill", None, 9),
        (0, 4, {"ANSWERS": "10.1.0.7"}, "prefill", "10.1.0.7:8000", 0),
        (1, 4, {"ANSWERS": "10.1.0.6", "ANSWERS_AT": "25"}, "decode", "10.1.0.6:8000", 25),
        (3, 4, {"ANSWERS": "10.1.0.6"}, "store", "10.1.0.6:8000", 0),
        (1, 2, {"ANSWERS": "10.1.0.7"}, "decode", "10.1.0.7:8000", 0),
        (0, 1, {"PODS": "10.1.0.5"}, "mixed", None, 0),
    ],
)
def test_a_pod_has_a_role_by_index_and_joins_who_answers(tmp_path, index, size, more, role, join, tries):
    more |= {"LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": str(size), "MOONCAKE_MODEL": "m"}
    more["LWS_LEADER_ADDRESS"] = "groups-0.groups-0.default"
    (node,) = pod()["spec"]["containers"]
    said, _ = pod_script(tmp_path, node, **more).communicate(timeout=120)
    config = parse(said.split())
    assert (config.role, config.join, config.host) == (role, join, "10.1.0.5")
    assert config.node_id == f"{role}-{index}" and slept(tmp_path) == tries
    assert 'getent ahostsv4 "${LWS_LEADER_ADDRESS#*.}"' in node["args"][0]
