"""Rendered manifests as Python values, and what the rules and tests read out of them."""
import functools
import os
import re
import shutil
import subprocess

import yaml

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
KUBERNETES = os.path.join(ROOT, "deploy", "kubernetes")
BASE = "base"
OVERLAYS = ("overlays/network", "overlays/rdma")


@functools.cache
def kustomize_command():
    """The installed renderer, or None. Components need kustomize 4.1: kubectl from 1.22 on."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        version = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True)
        match = re.search(r"v1\.(\d+)", version.stdout)
        if match and int(match[1]) >= 22:
            return ["kubectl", "kustomize"]
    return None


def render(folder):
    """The documents that `kubectl apply -k deploy/kubernetes/FOLDER` would send."""
    command = kustomize_command() + [os.path.join(KUBERNETES, folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    if done.stderr:
        raise RuntimeError(f"{' '.join(command)} warns: {done.stderr}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


def named(documents, kind, name):
    for document in of_kind(documents, kind):
        if document["metadata"]["name"] == name:
            return document
    raise KeyError(f"no {kind} {name}")


def pod_of(workload):
    return workload["spec"]["template"]["spec"]


def is_sidecar(container):
    return container.get("restartPolicy") == "Always"


def containers_of(pod):
    """All containers: those that run first, the sidecars, the workers."""
    return list(pod.get("initContainers") or []) + list(pod["containers"])


def kvstow_of(pod):
    """The container that runs kvstowd, or None."""
    for container in containers_of(pod):
        if container["name"] == "kvstow":
            return container
    return None


_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
          "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text):
    """A Kubernetes quantity as a number: "9Gi", "500m", 4."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"not a quantity: {text}")
    return float(match[1]) * _UNITS[match[2]]


_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
          "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def config_bytes(text):
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]+)", text)
    return float(match[1]) * _BYTES[match[2]]


def config_seconds(text):
    match = re.fullmatch(r"([0-9.]+)([a-z]+)", text)
    return float(match[1]) * _SECONDS[match[2]]


def parse_config(text):
    """kvstowd's text-format file as {"dram.capacity": "8GiB"}; kvstowd itself checks the names."""
    text = re.sub(r"#[^\n]*", "", text)
    tokens = re.findall(r'"[^"]*"|[A-Za-z_][A-Za-z_0-9]*|[0-9.]+|[{}:]', text)
    values, sections, name = {}, [], None
    for token in tokens:
        if token == "{":
            sections.append(name)
        elif token == "}":
            sections.pop()
        elif token == ":":
            continue
        elif re.match(r"[A-Za-z_]", token):
            name = token
        else:
            value = token.strip('"') if token.startswith('"') else int(token)
            values[".".join(sections + [name])] = value
    return values


def config_of(documents, pod):
    """The text of the configuration file that the pod's kvstowd reads, and its name in the pod."""
    argument = [a for a in kvstow_of(pod)["args"] if a.startswith("--config=")][0]
    path = argument.removeprefix("--config=")
    for mount in kvstow_of(pod)["volumeMounts"]:
        if os.path.dirname(path) == mount["mountPath"]:
            volume = [v for v in pod["volumes"] if v["name"] == mount["name"]][0]
            config_map = named(documents, "ConfigMap", volume["configMap"]["name"])
            return config_map["data"][os.path.basename(path)], path
    raise KeyError(f"{path} lies on no volume")


def mount_at(container, path):
    """The mount that `path` lies on, or None: then it is the read-only root."""
    best = None
    for mount in container.get("volumeMounts") or []:
        folder = mount["mountPath"].rstrip("/")
        if path == folder or path.startswith(folder + "/"):
            if best is None or len(folder) > len(best["mountPath"]):
                best = mount
    return best


def volume_of(pod, mount):
    return [volume for volume in pod["volumes"] if volume["name"] == mount["name"]][0]
