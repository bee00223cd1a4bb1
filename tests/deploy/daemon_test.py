"""The real kvstowd takes the files of deploy/, answers its probes and drains in time."""
import json
import os
import re
import signal
import tempfile
import time
import unittest
import urllib.request

from daemon import MISSING, Daemon, run
from manifests import (BASE, ROOT, config_of, kustomize_command, kvstow_of, named, pod_of, render)
from rules import block_bytes

NO_RENDERER = None if kustomize_command() else "neither kustomize nor kubectl is installed"
DASHBOARD = os.path.join(ROOT, "deploy", "dashboards", "kvstow.json")
# Labels that the scraper adds, and those of PromQL itself.
SCRAPER_LABELS = {"namespace", "pod", "le"}


def image_config():
    path = os.path.join(ROOT, "deploy", "container", "kvstowd.textproto")
    with open(path, encoding="utf-8") as stream:
        return stream.read()


def check_config(text):
    """Has kvstowd read a configuration, whole. It stops before it takes any memory, because the
    socket's folder does not exist: status 1. A configuration that it does not take is status 2."""
    with tempfile.NamedTemporaryFile("w", suffix=".textproto") as out:
        out.write(text)
        out.flush()
        return run(["kvstowd", f"--config={out.name}",
                    "--listen.unix_socket=/nonexistent/kvstow.sock"])


@unittest.skipIf(MISSING or NO_RENDERER, MISSING or NO_RENDERER)
class Config(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pod = pod_of(named(documents := render(BASE), "Deployment", "vllm-prefill"))
        cls.text, _ = config_of(documents, cls.pod)

    def test_kvstowd_takes_the_files(self):
        for text in (self.text, image_config()):
            done = check_config(text)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("folder /nonexistent does not exist", done.stderr)

    def test_kvstowd_counts_the_bytes_of_a_block_that_the_rules_count(self):
        disk = {"nvme.path": "/disk"}
        for settings in ({}, disk, disk | {"hbm.capacity": "1GiB"}, disk | {"policy.name": "arc"},
                         {"policy.name": "s3fifo"}):
            flags = [f"--{name}={value}" for name, value in settings.items()]
            done = run(["kvstowd", f"--limits.blocks={10**15}"] + flags)
            self.assertIn(f" take {block_bytes(settings)} bytes of each", done.stderr)

    def test_kvstowd_refuses_a_misspelt_key_in_them(self):
        for text in (self.text, image_config()):
            done = check_config(text.replace("dram { capacity", "dram { capactiy"))
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("dram.capactiy", done.stderr)

    def test_probes_answer_while_it_lives_and_only_then(self):
        container = kvstow_of(self.pod)
        grace = self.pod["terminationGracePeriodSeconds"]
        probes = [(container[name], container[name]["exec"]["command"])
                  for name in ("startupProbe", "livenessProbe")]
        with Daemon(self.text) as daemon:
            def ask(probe, command):
                started = time.monotonic()
                done = run([daemon.path(word) for word in command])
                self.assertLess(time.monotonic() - started, probe["timeoutSeconds"])
                return done

            for probe, command in probes:
                done = ask(probe, command)
                self.assertEqual(done.returncode, 0, done.stderr)
            daemon.signal(signal.SIGSTOP)  # a daemon that hangs
            for probe, command in probes:
                self.assertEqual(ask(probe, command).returncode, 1)
            daemon.signal(signal.SIGCONT)
            done = ask(*probes[0])
            self.assertEqual(done.returncode, 0, done.stderr)
            daemon.signal(signal.SIGTERM)
            self.assertEqual(daemon.wait(grace), 0, "".join(daemon.lines))
            for probe, command in probes:
                self.assertEqual(ask(probe, command).returncode, 1)


def panels_of(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions_of(dashboard):
    queries = [variable["query"] for variable in dashboard["templating"]["list"]]
    return queries + [target["expr"] for panel in panels_of(dashboard)
                      for target in panel["targets"]]


def metrics_of(text):
    """{name: names of its labels} of everything in an expression that looks like ours."""
    found = {}
    for name, labels in re.findall(r"\b(kvstow_[a-z0-9_]+)(\{[^}]*\})?", text):
        found.setdefault(name, set()).update(re.findall(r"([a-z_]+)\s*[=!~]", labels))
    return found


def grouped_labels_of(text):
    return {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", text)
            for label in group.split(",")}


def exported_by(page):
    """{name: names of its labels} of the samples of a Prometheus page."""
    found = {}
    for name, labels in re.findall(r"^([a-z0-9_]+)(\{[^}]*\})? ", page, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'([a-z_]+)="', labels))
    return found


@unittest.skipIf(MISSING, MISSING)
class Dashboard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(DASHBOARD, encoding="utf-8") as stream:
            cls.dashboard = json.load(stream)
        with Daemon(image_config()) as daemon:
            target = "--target=" + daemon.path("unix:/run/kvstow/kvstow.sock")
            done = run(["kvstow", "put", "tests/data/smollm2_kv.safetensors", "--durable", target])
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
            url = f"http://{daemon.metrics_address()}/metrics"
            with urllib.request.urlopen(url, timeout=20) as answer:
                cls.exported = exported_by(answer.read().decode())

    def test_every_metric_and_label_is_exported(self):
        named_metrics = 0
        for expression in expressions_of(self.dashboard):
            for name, labels in metrics_of(expression).items():
                named_metrics += 1
                self.assertTrue(name in self.exported, f"{name} is not exported: {expression}")
                labels = labels | grouped_labels_of(expression)
                self.assertLessEqual(labels - SCRAPER_LABELS, self.exported[name], expression)
        self.assertGreater(named_metrics, 40)

    def test_a_metric_that_is_not_exported_would_be_found(self):
        made_up = metrics_of('sum by (tier) (rate(kvstow_teir_blocks{pod=~"$pod", x="1"}[5m]))')
        self.assertEqual(made_up, {"kvstow_teir_blocks": {"pod", "x"}})
        self.assertNotIn("kvstow_teir_blocks", self.exported)

    def test_what_must_never_happen_is_shown(self):
        text = " ".join(expressions_of(self.dashboard))
        for name in ("corrupt_blocks", "bad_checksums", "nvme_write_errors", "dirs_set_aside",
                     "admission_refused", "executor_refused"):
            self.assertIn(f"kvstow_{name}_total", text)

    def test_panels_are_whole(self):
        panels = self.dashboard["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        for panel in panels_of(self.dashboard):
            self.assertTrue(panel["title"] and panel["description"], panel["id"])
            self.assertTrue(panel["targets"], panel["title"])
            for target in panel["targets"]:
                self.assertEqual(target["expr"].count("("), target["expr"].count(")"))
                self.assertIn('pod=~"$pod"', target["expr"], panel["title"])
        cells = [(x, y) for panel in panels for x in range(panel["gridPos"]["w"])
                 for y in range(panel["gridPos"]["y"],
                                panel["gridPos"]["y"] + panel["gridPos"]["h"])
                 for x in [x + panel["gridPos"]["x"]]]
        self.assertEqual(len(cells), len(set(cells)), "panels overlap")


if __name__ == "__main__":
    unittest.main()
