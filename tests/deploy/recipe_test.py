"""The recipe names what the build and the programs need, and no more."""
import os
import re
import subprocess
import unittest

import recipe
from daemon import KVSTOW, KVSTOWD, MISSING
from manifests import BASE, ROOT, containers_of, kustomize_command, named, pod_of, render

# Of every Debian image.
ALWAYS_THERE = {"libc6", "libstdc++6", "libgcc-s1"}


def owners_of_needed(program):
    """The packages of the libraries that a program names itself."""
    dynamic = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True)
    resolved = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    owners = set()
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic.stdout):
        match = re.search(rf"{re.escape(library)} => (\S+)", resolved)
        if not match:
            continue  # the loader itself
        path = os.path.realpath(match[1])
        for candidate in (path, path.removeprefix("/usr"), "/usr" + path):
            done = subprocess.run(["dpkg-query", "-S", candidate], capture_output=True, text=True)
            if done.returncode == 0:
                owners.add(done.stdout.split(":")[0])
                break
        else:
            raise RuntimeError(f"{path} belongs to no package")
    return owners


class Recipe(unittest.TestCase):
    def test_context_has_what_the_build_reads(self):
        with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as stream:
            folders = set(re.findall(r"add_subdirectory\((\w+)\)", stream.read())) - {"tests"}
        self.assertGreater(len(folders), 4)
        context = set(recipe.context())
        read = {path for path in recipe.tree() if path.split("/")[0] in folders}
        self.assertEqual(sorted(read - context), [])
        self.assertEqual({"CMakeLists.txt", "CMakePresets.json"} - context, set())

    def test_context_has_no_more(self):
        for path in recipe.context():
            self.assertNotIn(path.split("/")[0], {"tests", ".ci", "build"})
        self.assertFalse([path for path in recipe.context() if "kubernetes" in path])

    def test_every_copied_file_is_in_the_context(self):
        context = recipe.context()
        for stage in recipe.stages():
            for origin, sources, _ in recipe.copies(stage):
                for source in sources if origin is None else []:
                    self.assertTrue(source == "." or source in context, source)

    def test_last_ignore_rule_wins(self):
        rules = ["*", "!deploy/container", "**/__pycache__"]
        self.assertTrue(recipe.is_ignored("README.md", rules))
        self.assertTrue(recipe.is_ignored("deploy/README.md", rules))
        self.assertFalse(recipe.is_ignored("deploy/container/Dockerfile", rules))
        self.assertTrue(recipe.is_ignored("deploy/container/__pycache__/x.pyc", rules))

    def test_image_runs_as_a_number_with_the_two_volumes(self):
        settings = recipe.stages()[-1].settings
        # Kubernetes can tell that it is not root only from a number.
        self.assertRegex(settings["USER"], r"^[1-9]\d*:[1-9]\d*$")
        self.assertEqual(settings["ENTRYPOINT"], ["kvstowd"])
        self.assertEqual(settings["VOLUME"], ["/run/kvstow", "/var/lib/kvstow"])

    @unittest.skipIf(MISSING, MISSING)
    def test_image_installs_the_libraries_that_the_programs_load(self):
        needed = owners_of_needed(KVSTOWD) | owners_of_needed(KVSTOW)
        listed = set(recipe.installed_packages(recipe.stages()[-1]))
        self.assertEqual(listed, needed - ALWAYS_THERE)

    @unittest.skipUnless(kustomize_command(), "neither kustomize nor kubectl is installed")
    def test_manifests_mount_the_volumes_and_use_the_user(self):
        pod = pod_of(named(render(BASE), "Deployment", "vllm-prefill"))
        settings = recipe.stages()[-1].settings
        context = pod["securityContext"]
        self.assertEqual(settings["USER"], f"{context['runAsUser']}:{context['runAsGroup']}")
        sidecar = containers_of(pod)[0]
        writable = {mount["mountPath"] for mount in sidecar["volumeMounts"]
                    if not mount.get("readOnly")}
        self.assertEqual(writable, set(settings["VOLUME"]))


if __name__ == "__main__":
    unittest.main()
