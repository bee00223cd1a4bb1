"""Manifests against the schemas of Kubernetes, the chart against the base, queries as PromQL."""
import copy
import json
import os
import re
import unittest

import rules
from manifests import (BASE, KUBERNETES, OVERLAYS, ROOT, kustomize_command, kvstow_of, named,
                       of_kind, pod_of, render)

try:
    import helm_python
    import kubernetes_validate
    import promql_parser
    import yaml
    NEEDS = None if kustomize_command() else "neither kustomize nor kubectl is installed"
except ImportError as error:
    NEEDS = f"{error.name} is not installed; tests/deploy/run.sh installs it"

OLDEST = 29  # native sidecars are on by default since 1.29
CHART = os.path.join(KUBERNETES, "chart")


def versions():
    """Minor versions whose schemas are there, from the oldest that we support."""
    folder = os.path.join(os.path.dirname(kubernetes_validate.__file__), "kubernetes-json-schema")
    minors = {int(re.match(r"v1\.(\d+)\.", name)[1]) for name in os.listdir(folder)}
    return sorted(minor for minor in minors if minor >= OLDEST)


def validate(documents, minor):
    for document in documents:
        kubernetes_validate.validate(document, f"1.{minor}", strict=True)


def render_chart(values=None):
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values or {}, name="kvstow", namespace="kvstow")
    return [document for text in texts.values() for document in yaml.safe_load_all(text)
            if document]


def plain(documents):
    """{(kind, name): document} with what the two tools must write differently made equal: the
    hash in the ConfigMap's name, the spaces in JSON, and the order of lists that have names."""
    def walk(value):
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            items = [walk(item) for item in value]
            if items and all(isinstance(item, dict) and "name" in item for item in items):
                items.sort(key=lambda item: item["name"])
            return items
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return yaml.safe_load(value)
        if isinstance(value, str):
            return re.sub(r"^kvstow-config-[0-9a-z]{10}$", "kvstow-config", value)
        return value
    return {(document["kind"], document["metadata"]["name"]): document
            for document in map(walk, documents)}


@unittest.skipIf(NEEDS, NEEDS)
class Schema(unittest.TestCase):
    def test_every_folder_is_valid_in_every_version(self):
        self.assertGreater(len(versions()), 5)
        for folder in (BASE,) + OVERLAYS:
            documents = render(folder)
            for minor in versions():
                with self.subTest(folder=folder, minor=minor):
                    validate(documents, minor)

    def test_a_misspelt_field_is_refused(self):
        for break_it in (lambda pod: pod.update(terminationGracePeriodSecond=1),
                         lambda pod: pod.update(terminationGracePeriodSeconds="2m"),
                         lambda pod: kvstow_of(pod).update(restartPolicies="Always"),
                         lambda pod: pod["volumes"][0].pop("name")):
            documents = copy.deepcopy(render(BASE))
            break_it(pod_of(named(documents, "Deployment", "vllm-prefill")))
            with self.assertRaises(kubernetes_validate.ValidationError):
                validate(documents, versions()[-1])


@unittest.skipIf(NEEDS, NEEDS)
class Chart(unittest.TestCase):
    def test_U18_chart_renders_the_base(self):
        self.maxDiff = None
        base = plain(render(BASE))
        base.pop(("Namespace", "kvstow"))
        chart = plain(render_chart())
        self.assertEqual(sorted(chart), sorted(base))
        for key, document in base.items():
            self.assertEqual(chart[key], document, key)

    def test_chart_holds_every_rule_and_schema(self):
        documents = render_chart()
        findings = rules.check(documents)
        self.assertEqual(findings, [])
        validate(documents, versions()[-1])

    def test_values_reach_the_manifests(self):
        config = 'listen { unix_socket: "/run/kvstow/kvstow.sock" }\n'
        documents = render_chart({
            "model": "org/model", "workers": {"decode": {"replicas": 5}},
            "vllm": {"image": "site/vllm:1", "kvRole": "kv_producer", "codec": "small"},
            "kvstow": {"image": "site/kvstow:2", "config": config,
                       "disk": {"storageClassName": "local-nvme", "size": "1Ti"}}})
        decode = named(documents, "Deployment", "vllm-decode")
        pod = pod_of(decode)
        worker = pod["containers"][0]
        claim = [v for v in pod["volumes"] if v["name"] == "kvstow-disk"][0]["ephemeral"]
        claim = claim["volumeClaimTemplate"]["spec"]
        self.assertEqual(decode["spec"]["replicas"], 5)
        self.assertEqual(worker["image"], "site/vllm:1")
        self.assertIn("--model=org/model", worker["args"])
        self.assertIn('"kv_role":"kv_producer"', worker["args"][-1])
        self.assertIn('"codec":"small"', worker["args"][-1])
        self.assertEqual(kvstow_of(pod)["image"], "site/kvstow:2")
        self.assertEqual(claim["storageClassName"], "local-nvme")
        self.assertEqual(claim["resources"]["requests"]["storage"], "1Ti")
        config_map = of_kind(documents, "ConfigMap")[0]
        self.assertEqual(config_map["data"]["kvstowd.textproto"], config)
        unchanged = of_kind(render_chart(), "ConfigMap")[0]
        self.assertNotEqual(config_map["metadata"]["name"], unchanged["metadata"]["name"])

    def test_lint_finds_nothing(self):
        findings = helm_python.lint(CHART)
        self.assertEqual(findings["total_charts_linted"], 1)
        found = [finding["error"] for finding in findings["messages"]]
        self.assertEqual([error for error in found if error != "icon is recommended"], [])


@unittest.skipIf(NEEDS, NEEDS)
class DashboardQueries(unittest.TestCase):
    def test_every_query_is_promql(self):
        path = os.path.join(ROOT, "deploy", "dashboards", "kvstow.json")
        with open(path, encoding="utf-8") as stream:
            panels = json.load(stream)["panels"]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
        self.assertGreater(len(queries), 30)
        for query in queries:
            promql_parser.parse(query.replace("$__rate_interval", "5m"))  # what Grafana puts there

    def test_a_broken_query_is_refused(self):
        for query in ("sum(kvstow_blocks", "rate(kvstow_seals_total)", "sum by tier (kvstow_blocks)"):
            with self.assertRaises(ValueError):
                promql_parser.parse(query)


if __name__ == "__main__":
    unittest.main()
