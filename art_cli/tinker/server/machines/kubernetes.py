"""Manifests for Kubernetes: one replica with GPUs, a claim for its checkpoints, and a service in front of it.

The key is in a Secret that the user makes. There is one replica, because the adapters in training are in its memory. It
is stopped before the next one starts, because both would write to the same claim.
"""

from typing import Any

from art_cli.runtime.errors import UsageError
from art_cli.tinker.server.machines import LOAD_S, NAME, Server, dump, mount_of

CONFIG_DIRECTORY, KEY_DIRECTORY = "/etc/art/config", "/etc/art/keys"
USER = 1000  # the user of the Dockerfile
PROBE_S = 10
DISK = "200Gi"
Json = dict[str, Any]


def write(server: Server) -> str:
    """Raises UsageError: no image is named, or the checkpoints are not at an absolute path."""
    if server.image is None:
        raise UsageError(
            "--image: a cluster pulls an image: docker build -t REGISTRY/art . && docker push REGISTRY/art"
        )
    mount = mount_of(server)
    secret = f"kubectl create secret generic {NAME} --from-file="
    make = f"{secret}keys=KEY_FILE" if server.key_file else f'printf %s "$ART_API_KEY" | {secret}key=/dev/stdin'
    head = f"# {make}\n# kubectl apply -f THIS_FILE\n"
    config = [] if server.config is None else [_config_map(server.config)]
    return head + dump(*config, _claim(), _deployment(server, mount), _service(server.port))


def _named(kind: str, version: str = "v1", **rest: object) -> Json:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": NAME, "labels": {"app": NAME}}, **rest}


def _config_map(text: str) -> Json:
    return _named("ConfigMap", data={"config.yaml": text})


def _claim() -> Json:
    requests = {"requests": {"storage": DISK}}
    return _named("PersistentVolumeClaim", spec={"accessModes": ["ReadWriteOnce"], "resources": requests})


def _service(port: int) -> Json:
    return _named(
        "Service", spec={"selector": {"app": NAME}, "ports": [{"name": "http", "port": port, "targetPort": "http"}]}
    )


def _deployment(server: Server, mount: str) -> Json:
    pod: Json = {
        "terminationGracePeriodSeconds": int(server.drain_s) + 30,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [_container(server, mount)],
        "volumes": _volumes(server),
    }
    spec: Json = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {"app": NAME}},
        "template": {"metadata": {"labels": {"app": NAME}}, "spec": pod},
    }
    return _named("Deployment", "apps/v1", spec=spec)


def _container(server: Server, mount: str) -> Json:
    command = server.command(checkpoints=mount, config=f"{CONFIG_DIRECTORY}/config.yaml", keys=f"{KEY_DIRECTORY}/keys")
    mounts = [{"name": "checkpoints", "mountPath": mount}, {"name": "memory", "mountPath": "/dev/shm"}]
    if server.config is not None:
        mounts.append({"name": "config", "mountPath": CONFIG_DIRECTORY})
    if server.key_file is not None:
        mounts.append({"name": "keys", "mountPath": KEY_DIRECTORY})
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_S, "timeoutSeconds": 5}
    return {
        "name": NAME,
        "image": server.image,
        "command": [_literal(word) for word in command],
        "env": _environment(server, mount),
        "ports": [{"name": "http", "containerPort": server.port}],
        "resources": {"limits": {"nvidia.com/gpu": server.gpu.number}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "startupProbe": {**probe, "failureThreshold": LOAD_S // PROBE_S},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 12},
        "volumeMounts": mounts,
    }


def _environment(server: Server, mount: str) -> list[Json]:
    """The key, a token for models that need one, and where downloaded models are kept."""
    key = {"secretKeyRef": {"name": NAME, "key": "key"}}
    token = {"secretKeyRef": {"name": NAME, "key": "hf-token", "optional": True}}
    return [
        *([] if server.key_file is not None else [{"name": server.secret, "valueFrom": key}]),
        {"name": "HF_TOKEN", "valueFrom": token},
        {"name": "HF_HOME", "value": f"{mount}/huggingface"},
    ]


def _volumes(server: Server) -> list[Json]:
    volumes: list[Json] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": NAME}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # processes of one server share tensors there
    ]
    if server.config is not None:
        volumes.append({"name": "config", "configMap": {"name": NAME}})
    if server.key_file is not None:
        volumes.append({"name": "keys", "secret": {"secretName": NAME, "items": [{"key": "keys", "path": "keys"}]}})
    return volumes


def _literal(word: str) -> str:
    """The word as Kubernetes leaves it: it replaces $(NAME) in a command by a variable, and $$ by $."""
    return word.replace("$", "$$")
