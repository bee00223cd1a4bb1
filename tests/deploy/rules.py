"""What rendered manifests must hold. Each rule yields messages; a message is a fault.

    for rule, message in check(documents): ...

The first group is the `restricted` profile of the Pod Security Standards, written from its text.
"""
import json
import os

from manifests import (config_bytes, config_of, config_seconds, containers_of, is_sidecar,
                       kvstow_of, mount_at, named, of_kind, parse_config, pod_of, quantity,
                       volume_of)

RULES = []
CANNOT_JUDGE = "cannot be judged"
MEMORY_SLACK_BYTES = 256 * 2**20
DISK_SLACK = 1.15
FLUSH_BYTES_PER_SECOND = 200e6
STOP_SECONDS = 8               # the metrics page 2, slices 5, short calls 0.5: service/README.md
ALLOWED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral",
                   "persistentVolumeClaim", "projected", "secret"}


def block_bytes(settings):
    """What a block takes beside its own bytes: README.md, Limits. daemon_test.py asks kvstowd."""
    tiers = 1 + sum(name in settings for name in ("hbm.capacity", "nvme.path"))
    has_ghosts = settings.get("policy.name") in ("s3fifo", "arc")
    return 400 + tiers * (400 if has_ghosts else 100)


def rule(function):
    RULES.append(function)
    return function


def check(documents):
    """All faults, as (name of the rule, message)."""
    findings = []
    for one in RULES:
        try:
            findings += [(one.__name__, message) for message in one(documents)]
        except (KeyError, IndexError) as error:
            findings.append((one.__name__, f"{CANNOT_JUDGE}: {error!r} is missing"))
    return findings


def pods(documents):
    for kind in ("Deployment", "StatefulSet", "DaemonSet"):
        for workload in of_kind(documents, kind):
            yield workload["metadata"]["name"], pod_of(workload)


def containers(documents):
    for name, pod in pods(documents):
        for container in containers_of(pod):
            yield f"{name}/{container['name']}", pod, container


def kvstow_pods(documents):
    """Name, pod, kvstow's container, and its settings: the file's, with flags over them."""
    for name, pod in pods(documents):
        container = kvstow_of(pod)
        if container is None:
            continue
        settings = parse_config(config_of(documents, pod)[0])
        for argument in container["args"]:
            flag, _, value = argument.removeprefix("--").partition("=")
            settings[flag] = value
        yield name, pod, container, settings


def security(pod, container, field):
    """A field that the container may set over the pod."""
    own = container.get("securityContext") or {}
    return own.get(field, (pod.get("securityContext") or {}).get(field))


# --- the restricted profile ---

@rule
def host_namespaces(documents):
    for name, pod in pods(documents):
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(field):
                yield f"{name}: {field} is set"


@rule
def volume_types(documents):
    for name, pod in pods(documents):
        for volume in pod.get("volumes") or []:
            for kind in set(volume) - {"name"} - ALLOWED_VOLUMES:
                yield f"{name}: volume {volume['name']} is a {kind}"


@rule
def host_ports(documents):
    for name, _, container in containers(documents):
        for port in container.get("ports") or []:
            if port.get("hostPort"):
                yield f"{name}: hostPort {port['hostPort']}"


@rule
def privileges(documents):
    for name, _, container in containers(documents):
        context = container.get("securityContext") or {}
        if context.get("privileged"):
            yield f"{name}: privileged"
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation is not false"
        if context.get("procMount", "Default") != "Default":
            yield f"{name}: procMount {context['procMount']}"


@rule
def capabilities(documents):
    for name, _, container in containers(documents):
        wanted = (container.get("securityContext") or {}).get("capabilities") or {}
        if "ALL" not in (wanted.get("drop") or []):
            yield f"{name}: capabilities are not all dropped"
        for added in set(wanted.get("add") or []) - {"NET_BIND_SERVICE"}:
            yield f"{name}: capability {added}"


@rule
def non_root(documents):
    for name, pod, container in containers(documents):
        if security(pod, container, "runAsNonRoot") is not True:
            yield f"{name}: runAsNonRoot is not true"
        if not security(pod, container, "runAsUser"):
            yield f"{name}: runAsUser is not a number above 0"


@rule
def seccomp(documents):
    for name, pod, container in containers(documents):
        profile = security(pod, container, "seccompProfile") or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: seccompProfile is {profile.get('type')}"


@rule
def kernel_settings(documents):
    for name, pod, container in containers(documents):
        if (pod.get("securityContext") or {}).get("sysctls"):
            yield f"{name}: sysctls"
        if security(pod, container, "seLinuxOptions"):
            yield f"{name}: seLinuxOptions"


# --- more than the profile asks ---

@rule
def enforced_namespace(documents):
    for namespace in of_kind(documents, "Namespace"):
        labels = namespace["metadata"].get("labels") or {}
        if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{namespace['metadata']['name']}: the restricted profile is not enforced"


@rule
def read_only_root(documents):
    for name, _, container in containers(documents):
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is not True:
            yield f"{name}: readOnlyRootFilesystem is not true"


@rule
def no_token(documents):
    for name, pod in pods(documents):
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: a service account's token is mounted"


@rule
def bounded_resources(documents):
    for name, _, container in containers(documents):
        resources = container.get("resources") or {}
        for what in ("cpu", "memory", "ephemeral-storage"):
            for side in ("requests", "limits"):
                if what not in (resources.get(side) or {}):
                    yield f"{name}: no {side} of {what}"


@rule
def bounded_folders(documents):
    for name, pod in pods(documents):
        for volume in pod.get("volumes") or []:
            if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
                yield f"{name}: emptyDir {volume['name']} has no sizeLimit"


@rule
def probes(documents):
    for name, _, container in containers(documents):
        wanted = {"startupProbe", "livenessProbe", "readinessProbe"}
        if is_sidecar(container):
            # A pod is ready when its worker is: without kvstow it is slower, not broken.
            wanted.discard("readinessProbe")
            if "readinessProbe" in container:
                yield f"{name}: a sidecar that is not ready takes the worker out of service"
        for probe in sorted(wanted - set(container)):
            yield f"{name}: no {probe}"


@rule
def pinned_images(documents):
    for name, _, container in containers(documents):
        image = container["image"]
        tag = image.rsplit("/", 1)[-1].partition(":")[2]
        if "@sha256:" not in image and (not tag or tag == "latest"):
            yield f"{name}: image {image} has no fixed tag"


@rule
def disruption(documents):
    for workload in of_kind(documents, "Deployment"):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        budgets = [b for b in of_kind(documents, "PodDisruptionBudget")
                   if b["spec"]["selector"]["matchLabels"].items() <= labels.items()]
        if len(budgets) != 1:
            yield f"{workload['metadata']['name']}: {len(budgets)} disruption budgets, want 1"
        for budget in budgets:
            if budget["spec"].get("maxUnavailable") != 1:
                yield f"{budget['metadata']['name']}: maxUnavailable is not 1: nodes cannot drain"


# --- ours ---

@rule
def native_sidecar(documents):
    for name, pod, container, _ in kvstow_pods(documents):
        first = (pod.get("initContainers") or [{}])[0]
        if first is not container or not is_sidecar(container):
            yield f"{name}: kvstow is no native sidecar that starts first"


@rule
def one_user(documents):
    for name, pod in pods(documents):
        users = {security(pod, container, "runAsUser") for container in containers_of(pod)}
        if len(users) != 1:
            yield f"{name}: users {users}: only the socket's owner may connect to it"


@rule
def memory_fits(documents):
    for name, _, container, settings in kvstow_pods(documents):
        need = (config_bytes(settings["dram.capacity"])
                + block_bytes(settings) * settings["limits.blocks"]
                + config_bytes(settings["limits.bytes_in_flight"]) + MEMORY_SLACK_BYTES)
        have = quantity(container["resources"]["limits"]["memory"])
        if have < need:
            yield f"{name}: memory limit {have / 2**20:.0f} MiB, need {need / 2**20:.0f} MiB"
        if quantity(container["resources"]["requests"]["memory"]) != have:
            yield f"{name}: the arena is populated at start: request memory as the limit is"


@rule
def threads_fit(documents):
    for name, _, container, settings in kvstow_pods(documents):
        cores = quantity(container["resources"]["limits"]["cpu"])
        if settings.get("limits.worker_threads") != cores:
            yield f"{name}: worker_threads is not the CPU limit of {cores:.0f}"


@rule
def disk_fits(documents):
    for name, pod, container, settings in kvstow_pods(documents):
        mount = mount_at(container, settings["nvme.path"])
        volume = volume_of(pod, mount) if mount else {}
        if "ephemeral" not in volume or mount.get("readOnly"):
            yield f"{name}: nvme.path {settings['nvme.path']} is on no claimed, writable volume"
            continue
        spec = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        have = quantity(spec["resources"]["requests"]["storage"])
        need = DISK_SLACK * config_bytes(settings["nvme.capacity"])
        if have < need:
            yield f"{name}: volume of {have / 2**30:.0f} GiB, need {need / 2**30:.0f} GiB"


@rule
def socket_is_shared(documents):
    for name, pod, container, settings in kvstow_pods(documents):
        for other in containers_of(pod):
            mount = mount_at(other, os.path.dirname(settings["listen.unix_socket"]))
            volume = volume_of(pod, mount) if mount else {}
            if (volume.get("emptyDir") or {}).get("medium") != "Memory" or mount.get("readOnly"):
                yield f"{name}/{other['name']}: the socket's folder is no shared emptyDir in memory"


@rule
def probes_ask_the_socket(documents):
    for name, _, container, settings in kvstow_pods(documents):
        for probe in ("startupProbe", "livenessProbe"):
            command = container.get(probe, {}).get("exec", {}).get("command") or []
            if f"--target=unix:{settings['listen.unix_socket']}" not in command:
                yield f"{name}: {probe} does not ask {settings['listen.unix_socket']}"


@rule
def metrics_port(documents):
    for name, _, container, settings in kvstow_pods(documents):
        port = int(settings["metrics.address"].rsplit(":", 1)[1])
        if port not in [p["containerPort"] for p in container["ports"]]:
            yield f"{name}: the metrics page's port {port} is not declared"


@rule
def grace_covers_the_drain(documents):
    for name, pod, container, settings in kvstow_pods(documents):
        before_stop = 0
        for other in pod["containers"]:
            command = other.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            if command and command[0] == "sleep":
                before_stop = max(before_stop, float(command[1]))
        worker_stop = 30  # what Kubernetes gives a worker by itself
        flush = config_bytes(settings["nvme.write_behind_max"]) / FLUSH_BYTES_PER_SECOND
        drain = config_seconds(settings["drain_timeout"])
        need = before_stop + worker_stop + drain + STOP_SECONDS + flush
        if pod.get("terminationGracePeriodSeconds", 30) < need:
            yield f"{name}: terminationGracePeriodSeconds below {need:.0f}"


@rule
def workers_recompute(documents):
    """Engines know kvstow only by their configuration, and go on without it."""
    for name, pod in pods(documents):
        for worker in pod["containers"]:
            transfer = [a for a in worker.get("args", []) if a.lstrip().startswith("{")]
            if len(transfer) != 1:
                yield f"{name}/{worker['name']}: no kv-transfer-config"
                continue
            transfer = json.loads(transfer[0])
            if transfer.get("kv_load_failure_policy") != "recompute":
                yield f"{name}/{worker['name']}: a failed load must be recomputed"
            target = transfer.get("kv_connector_extra_config", {}).get("target", "")
            yield from _reaches(documents, f"{name}/{worker['name']}", pod, target)


def _reaches(documents, name, pod, target):
    """Does a worker's target lead to a kvstowd: of its own pod, or through a Service?"""
    if target.startswith("unix:"):
        sockets = [settings["listen.unix_socket"] for _, other, _, settings
                   in kvstow_pods(documents) if other is pod]
        if [target.removeprefix("unix:")] != sockets:
            yield f"{name}: no kvstow of its pod listens at {target}"
        return
    host, _, port = target.partition(":")
    try:
        service = named(documents, "Service", host)
    except KeyError:
        yield f"{name}: target {target} is no Service"
        return
    if int(port) not in [p["port"] for p in service["spec"]["ports"]]:
        yield f"{name}: Service {host} has no port {port}"


@rule
def services_lead_somewhere(documents):
    for service in of_kind(documents, "Service"):
        name = service["metadata"]["name"]
        selector = service["spec"]["selector"]
        selected = [w for w in of_kind(documents, "Deployment")
                    if selector.items() <= w["spec"]["template"]["metadata"]["labels"].items()]
        ports = {key for workload in selected for container in containers_of(pod_of(workload))
                 for port in container.get("ports") or []
                 for key in (port["name"], port["containerPort"])}
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in ports:
                yield f"{name}: nothing listens at {port['targetPort']}"


@rule
def open_ports_are_guarded(documents):
    """Every port that is open on the pod network is named by a policy that selects the pod."""
    policies = of_kind(documents, "NetworkPolicy")
    for workload in of_kind(documents, "Deployment"):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        named_ports = {port["port"] for policy in policies
                       if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
                       for entry in policy["spec"]["ingress"] if entry.get("from")
                       for port in entry["ports"]}
        declared = {port["containerPort"] for container in containers_of(pod_of(workload))
                    for port in container.get("ports") or []}
        for port in declared - named_ports:
            yield f"{workload['metadata']['name']}: no NetworkPolicy says who may reach {port}"


@rule
def data_port_is_declared(documents):
    """kvstowd listens on the pod network only where the manifest says so: it has no TLS yet."""
    for name, _, container, settings in kvstow_pods(documents):
        address = settings.get("listen.tcp", "")
        declared = [p["containerPort"] for p in container["ports"] if p["name"] == "kvstow-grpc"]
        if [int(address.rsplit(":", 1)[1])] != declared if address else declared:
            yield f"{name}: listen.tcp is \"{address}\", declared {declared}"
