"""The rendered manifests hold every rule, and every rule finds the fault it is for."""
import copy
import json
import os
import re
import unittest

import rules
from manifests import (BASE, OVERLAYS, ROOT, containers_of, kustomize_command, kvstow_of, named,
                       of_kind, pod_of, render)

PACKAGE = os.path.join(ROOT, "client", "python")
NEEDS = None if kustomize_command() else "neither kustomize nor kubectl is installed"


def text_of(findings):
    return "\n".join(f"[{rule}] {message}" for rule, message in findings)


def prefill(documents):
    return pod_of(named(documents, "Deployment", "vllm-prefill"))


def kvstow(documents):
    return kvstow_of(prefill(documents))


def worker(documents):
    return prefill(documents)["containers"][0]


def volume(documents, name):
    return [v for v in prefill(documents)["volumes"] if v["name"] == name][0]


def edit_config(documents, old, new):
    for config_map in of_kind(documents, "ConfigMap"):
        text = config_map["data"]["kvstowd.textproto"]
        assert old in text, f"{old} is not in the configuration"
        config_map["data"]["kvstowd.textproto"] = text.replace(old, new)


def edit_transfer(documents, old, new):
    args = worker(documents)["args"]
    assert old in args[-1], f"{old} is not in {args[-1]}"
    args[-1] = args[-1].replace(old, new)


def keep_disk_in_memory(documents):
    disk = volume(documents, "kvstow-disk")
    disk.pop("ephemeral")
    disk["emptyDir"] = {"medium": "Memory", "sizeLimit": "120Gi"}


def spec_of(documents, kind, name):
    return named(documents, kind, name)["spec"]


# What each rule must find: (rule, what is broken, how).
FAULTS = [
    ("host_namespaces", "hostNetwork", lambda d: prefill(d).update(hostNetwork=True)),
    ("host_namespaces", "hostPID", lambda d: prefill(d).update(hostPID=True)),
    ("host_namespaces", "hostIPC", lambda d: prefill(d).update(hostIPC=True)),
    ("volume_types", "hostPath", lambda d: prefill(d)["volumes"].append(
        {"name": "nvme", "hostPath": {"path": "/mnt/nvme"}})),
    ("host_ports", "hostPort", lambda d: kvstow(d)["ports"][0].update(hostPort=9400)),
    ("privileges", "privileged", lambda d: kvstow(d)["securityContext"].update(privileged=True)),
    ("privileges", "escalation",
     lambda d: kvstow(d)["securityContext"].pop("allowPrivilegeEscalation")),
    ("privileges", "procMount",
     lambda d: worker(d)["securityContext"].update(procMount="Unmasked")),
    ("capabilities", "kept", lambda d: worker(d)["securityContext"].pop("capabilities")),
    ("capabilities", "IPC_LOCK",
     lambda d: kvstow(d)["securityContext"]["capabilities"].update(add=["IPC_LOCK"])),
    ("non_root", "may be root", lambda d: prefill(d)["securityContext"].pop("runAsNonRoot")),
    ("non_root", "is root", lambda d: kvstow(d)["securityContext"].update(runAsUser=0)),
    ("seccomp", "none", lambda d: prefill(d)["securityContext"].pop("seccompProfile")),
    ("seccomp", "unconfined", lambda d: kvstow(d)["securityContext"].update(
        seccompProfile={"type": "Unconfined"})),
    ("kernel_settings", "sysctl", lambda d: prefill(d)["securityContext"].update(
        sysctls=[{"name": "kernel.shm_rmid_forced", "value": "1"}])),
    ("kernel_settings", "SELinux", lambda d: kvstow(d)["securityContext"].update(
        seLinuxOptions={"type": "spc_t"})),
    ("enforced_namespace", "baseline", lambda d: of_kind(d, "Namespace")[0]["metadata"].update(
        labels={"pod-security.kubernetes.io/enforce": "baseline"})),
    ("read_only_root", "writable",
     lambda d: kvstow(d)["securityContext"].update(readOnlyRootFilesystem=False)),
    ("no_token", "token", lambda d: prefill(d).pop("automountServiceAccountToken")),
    ("bounded_resources", "no limit", lambda d: kvstow(d)["resources"]["limits"].pop("memory")),
    ("bounded_resources", "no request",
     lambda d: worker(d)["resources"]["requests"].pop("ephemeral-storage")),
    ("bounded_folders", "no limit", lambda d: volume(d, "tmp").update(emptyDir={})),
    ("probes", "no liveness", lambda d: kvstow(d).pop("livenessProbe")),
    ("probes", "no readiness", lambda d: worker(d).pop("readinessProbe")),
    ("probes", "readiness of a sidecar",
     lambda d: kvstow(d).update(readinessProbe=kvstow(d)["livenessProbe"])),
    ("pinned_images", "latest", lambda d: kvstow(d).update(image="kvstow:latest")),
    ("pinned_images", "no tag", lambda d: kvstow(d).update(image="localhost:5000/kvstow")),
    ("disruption", "no budget", lambda d: d.remove(
        named(d, "PodDisruptionBudget", "vllm-prefill"))),
    ("disruption", "no drain",
     lambda d: spec_of(d, "PodDisruptionBudget", "vllm-prefill").update(maxUnavailable=0)),
    ("native_sidecar", "an init container that never ends",
     lambda d: kvstow(d).pop("restartPolicy")),
    ("native_sidecar", "a container", lambda d: prefill(d)["containers"].append(
        prefill(d).pop("initContainers")[0])),
    ("one_user", "two", lambda d: worker(d)["securityContext"].update(runAsUser=2000)),
    ("memory_fits", "more blocks", lambda d: edit_config(d, "1000000", "10000000")),
    ("memory_fits", "a larger arena", lambda d: edit_config(d, '"8GiB"', '"9GiB"')),
    ("memory_fits", "more in flight", lambda d: edit_config(d, '"448MiB"', '"1GiB"')),
    ("memory_fits", "requested less",
     lambda d: kvstow(d)["resources"]["requests"].update(memory="1Gi")),
    ("threads_fit", "default", lambda d: edit_config(d, "worker_threads: 4", "")),
    ("disk_fits", "larger", lambda d: edit_config(d, '"100GiB"', '"110GiB"')),
    ("disk_fits", "in memory", keep_disk_in_memory),
    ("disk_fits", "elsewhere", lambda d: edit_config(d, '"/var/lib/kvstow"', '"/var/kvstow"')),
    ("socket_is_shared", "not mounted", lambda d: worker(d)["volumeMounts"].remove(
        [m for m in worker(d)["volumeMounts"] if m["name"] == "kvstow-socket"][0])),
    ("socket_is_shared", "on disk", lambda d: volume(d, "kvstow-socket")["emptyDir"].pop("medium")),
    ("socket_is_shared", "elsewhere",
     lambda d: edit_config(d, '"/run/kvstow/kvstow.sock"', '"/tmp/kvstow.sock"')),
    ("probes_ask_the_socket", "default target",
     lambda d: kvstow(d)["startupProbe"]["exec"].update(command=["kvstow", "ping"])),
    ("metrics_port", "other port", lambda d: edit_config(d, "9400", "9500")),
    ("grace_covers_the_drain", "long drain", lambda d: edit_config(d, '"20s"', '"2m"')),
    ("grace_covers_the_drain", "much to flush",
     lambda d: edit_config(d, 'write_behind_max: "1GiB"', 'write_behind_max: "16GiB"')),
    ("grace_covers_the_drain", "default",
     lambda d: prefill(d).pop("terminationGracePeriodSeconds")),
    ("workers_recompute", "default policy",
     lambda d: edit_transfer(d, '"kv_load_failure_policy": "recompute",', "")),
    ("workers_recompute", "other socket",
     lambda d: edit_transfer(d, "/run/kvstow/kvstow.sock", "/tmp/kvstow.sock")),
    ("workers_recompute", "no such service",
     lambda d: edit_transfer(d, "unix:/run/kvstow/kvstow.sock", "kvstow-store:7070")),
    ("services_lead_somewhere", "wrong port",
     lambda d: spec_of(d, "Service", "kvstow-metrics")["ports"][0].update(targetPort=9401)),
    ("services_lead_somewhere", "selects nothing",
     lambda d: spec_of(d, "Service", "vllm-prefill")["selector"].update(tier="gone")),
    ("open_ports_are_guarded", "no policy", lambda d: d.remove(
        named(d, "NetworkPolicy", "vllm"))),
    ("open_ports_are_guarded", "from anywhere",
     lambda d: [entry.pop("from") for entry in spec_of(d, "NetworkPolicy", "vllm")["ingress"]]),
    ("data_port_is_declared", "by a flag",
     lambda d: kvstow(d)["args"].append("--listen.tcp=0.0.0.0:7070")),
    ("data_port_is_declared", "by the file", lambda d: edit_config(
        d, "listen { ", 'listen { tcp: "0.0.0.0:7070" ')),
]


@unittest.skipIf(NEEDS, NEEDS)
class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = render(BASE)

    def test_U18_base_holds_every_rule(self):
        findings = rules.check(self.base)
        self.assertEqual(findings, [], text_of(findings))

    def test_overlays_hold_every_rule(self):
        for overlay in OVERLAYS:
            findings = rules.check(render(overlay))
            self.assertEqual(findings, [], f"{overlay}\n{text_of(findings)}")

    def test_every_rule_finds_its_faults(self):
        for rule, what, break_it in FAULTS:
            documents = copy.deepcopy(self.base)
            break_it(documents)
            found = {name for name, message in rules.check(documents)
                     if rules.CANNOT_JUDGE not in message}
            self.assertIn(rule, found, f"{rule} does not find: {what}")

    def test_every_rule_has_a_fault(self):
        self.assertEqual({rule.__name__ for rule in rules.RULES}, {rule for rule, _, _ in FAULTS})

    def test_both_workers_have_the_same_sidecar(self):
        prefill_pod, decode_pod = (pod_of(named(self.base, "Deployment", f"vllm-{role}"))
                                   for role in ("prefill", "decode"))
        self.assertEqual(kvstow_of(prefill_pod), kvstow_of(decode_pod))

    def test_only_the_network_overlay_opens_a_data_port(self):
        def ports(documents):
            return {port["containerPort"] for workload in of_kind(documents, "Deployment")
                    for container in containers_of(pod_of(workload))
                    for port in container["ports"]}
        self.assertEqual(ports(self.base), {8000, 9400})
        for overlay in OVERLAYS:
            self.assertEqual(ports(render(overlay)), {8000, 9400, 7070}, overlay)

    @unittest.skipUnless(os.path.exists(PACKAGE), "the Python package is not in this tree")
    def test_workers_name_the_connector_and_its_settings(self):
        for documents in [self.base] + [render(overlay) for overlay in OVERLAYS]:
            for workload in of_kind(documents, "Deployment"):
                transfer = json.loads(pod_of(workload)["containers"][0]["args"][-1])
                module = os.path.join(PACKAGE, *transfer["kv_connector_module_path"].split("."))
                with open(os.path.join(module, "connector.py"), encoding="utf-8") as stream:
                    self.assertIn(f"class {transfer['kv_connector']}(", stream.read())
                with open(os.path.join(module, "config.py"), encoding="utf-8") as stream:
                    known = re.findall(r"^    (\w+): ", stream.read(), re.MULTILINE)
                self.assertLessEqual(set(transfer["kv_connector_extra_config"]), set(known))

    def test_a_new_configuration_replaces_the_pods(self):
        """The ConfigMap's name carries a hash of its content, and pods name it."""
        name = of_kind(self.base, "ConfigMap")[0]["metadata"]["name"]
        self.assertRegex(name, r"^kvstow-config-[a-z0-9]{10}$")
        self.assertEqual(volume(self.base, "kvstow-config")["configMap"]["name"], name)


if __name__ == "__main__":
    unittest.main()
