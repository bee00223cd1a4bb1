"""Two real vLLM engines over one kvstow sidecar: the same tokens, whatever happens to the sidecar.

check_vllm.py MODEL PROMPTS      (run.sh prepares both)

Prints a line per check and ends with `N passed, N failed`.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "python"))
from conftest import Daemon  # noqa: E402  (also finds the package)

import kvstow  # noqa: E402

NUM_TOKENS = 32
LOAD_TIMEOUT_S = 3.0
LOOKUP_TIMEOUT_S = 0.5
SLACK_S = 2.0


class Engine:
    """A vllm_engine.py process."""

    def __init__(self, model, prompts, log, extra=None, one_by_one=False):
        command = [sys.executable, str(FOLDER / "vllm_engine.py"), model, prompts, str(NUM_TOKENS)]
        if extra is not None:
            command += ["--extra", json.dumps(extra)]
        if one_by_one:
            command.append("--one-by-one")
        package = pathlib.Path(kvstow.__file__).parents[1]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(log, "w"),
            text=True,
            env={**os.environ, "PYTHONPATH": str(package), "PYTHONHASHSEED": str(len(log))},
        )
        self.log = log

    def event(self, name):
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise RuntimeError(f"the engine ended before {name!r}; see {self.log}")

    def next_prompt(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.event("start")

    def results(self, count):
        return [self.event("done") for _ in range(count)]

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


class Checks:
    def __init__(self):
        self.passed = self.failed = 0

    def __call__(self, is_right, text):
        self.passed += is_right
        self.failed += not is_right
        print(f"  {'ok    ' if is_right else 'FAILED'} {text}", flush=True)


def equal(results, reference):
    return sum(a["tokens"] == b["tokens"] for a, b in zip(results, reference))


def first_equal(results, reference):
    return sum(a["tokens"][0] == b["tokens"][0] for a, b in zip(results, reference))


class Run:
    def __init__(self, arguments):
        self.model, self.prompts = arguments.model, arguments.prompts
        self.work = tempfile.mkdtemp(prefix="kvstow-engines-")
        self.check = Checks()
        with open(self.prompts) as file:
            self.count = sum(1 for _ in file)
        self.num_engines = 0

    def engine(self, **options):
        self.num_engines += 1
        return Engine(
            self.model, self.prompts, f"{self.work}/engine{self.num_engines}.log", **options
        )

    def serve(self, extra=None):
        engine = self.engine(extra=extra)
        engine.event("ready")
        results = engine.results(self.count)
        engine.end()
        return results

    def daemon(self):
        folder = tempfile.mkdtemp(dir=self.work)
        return Daemon(folder, dram="2GiB").start()

    def extra(self, daemon, codec):
        return {
            "target": daemon.target,
            "codec": codec,
            "load_timeout": LOAD_TIMEOUT_S,
            "lookup_timeout": LOOKUP_TIMEOUT_S,
        }

    # --- the checks ---

    def reference_run(self):
        print(f"{self.count} prompts x {NUM_TOKENS} tokens, without a connector", flush=True)
        self.reference = self.serve()
        lengths = [len(r["prompt_tokens"]) for r in self.reference]
        print(f"  prompts of {min(lengths)} to {max(lengths)} tokens", flush=True)

    def two_engines(self, codec):
        print(f"two engines, one store, codec {codec}", flush=True)
        daemon = self.daemon()
        first = self.serve(self.extra(daemon, codec))
        self.check(
            equal(first, self.reference) == self.count,
            f"the first engine: {equal(first, self.reference)} of {self.count} prompts equal to "
            "the engine without a connector",
        )
        with kvstow.Client(daemon.target) as client:
            stat = client.stat()
        print(f"  {stat.num_blocks} blocks stored: {stat.codecs}", flush=True)
        second = self.serve(self.extra(daemon, codec))
        cached = [r["cached"] for r in second]
        self.check(
            min(cached) > 0,
            f"the second engine took {min(cached)} to {max(cached)} tokens "
            f"of each prompt from the store, {sum(cached)} in all",
        )
        same, first_same = equal(second, self.reference), first_equal(second, self.reference)
        text = (
            f"{same} of {self.count} prompts equal in all {NUM_TOKENS} tokens, "
            f"{first_same} in the first"
        )
        if codec == "lossless":
            self.check(same == self.count, text)
        else:
            self.check(first_same >= 29 * self.count // 32, text)
        daemon.kill()

    def poisoned(self):
        print("negative control: zeros under the right keys", flush=True)
        daemon = self.daemon()
        first = self.serve(self.extra(daemon, "lossless"))
        with kvstow.Client(daemon.target) as client:
            block = next(client.list_blocks())
            model = client.get_model(block.fingerprint)
            import torch

            for done in first:
                tokens = done["prompt_tokens"]
                keys = kvstow.block_keys(model, tokens)
                client.delete(keys)
                dtype = {"f32": torch.float32, "opaque": torch.uint8}[model.spec.kv_dtype]
                layers = [
                    tuple(
                        torch.zeros(len(tokens), heads, dim, dtype=dtype) if dim else None
                        for dim in (k_dim, v_dim)
                    )
                    for heads, k_dim, v_dim in model.layer_shapes
                ]
                client.put(model, tokens, layers, codec="raw")
        second = self.serve(self.extra(daemon, "lossless"))
        same = equal(second, self.reference)
        self.check(min(r["cached"] for r in second) > 0, "the poisoned blocks were taken")
        self.check(
            same <= self.count // 4, f"{same} of {self.count} prompts equal: the comparison sees it"
        )
        daemon.kill()

    def faults(self):
        print("the daemon is killed, stopped, restarted while prompts are served", flush=True)
        daemon = self.daemon()
        self.serve(self.extra(daemon, "lossless"))  # fills the store
        engine = self.engine(extra=self.extra(daemon, "lossless"), one_by_one=True)
        engine.event("ready")
        plan = {
            3: ("killed", daemon.kill),
            8: ("restarted", daemon.start),
            14: ("stopped", lambda: daemon.signal(signal.SIGSTOP)),
            20: ("continued", lambda: daemon.signal(signal.SIGCONT)),
            24: ("killed", daemon.kill),
            26: ("restarted", daemon.start),
        }
        results, quiet, state = [], [], "running"
        for i in range(self.count):
            engine.next_prompt()
            if i in plan:  # while the prompt is being served
                state, act = plan[i]
                act()
            done = engine.event("done")
            results.append(done)
            if i < 3:
                quiet.append(done["seconds"])
            print(
                f"  prompt {i}: daemon {state}, {done['cached']} cached, {done['seconds']} s",
                flush=True,
            )
        engine.end()
        self.check(
            equal(results, self.reference) == self.count,
            f"{equal(results, self.reference)} of {self.count} prompts with the right tokens",
        )
        # A prompt computed alone, from nothing, on this machine; then what the sidecar may add.
        alone = (
            max(r["seconds"] for r in results if r["cached"] == 0)
            if any(r["cached"] == 0 for r in results)
            else max(quiet)
        )
        limit = max(quiet) + LOOKUP_TIMEOUT_S + LOAD_TIMEOUT_S + SLACK_S
        longest = max(r["seconds"] for r in results)
        self.check(
            longest <= limit,
            f"the longest took {longest} s (quiet {max(quiet)} s, computed "
            f"{alone} s), limit {limit:.1f} s: quiet + deadlines + {SLACK_S} s",
        )
        daemon.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--only", default="lossless,safe,poisoned,faults")
    run = Run(parser.parse_args())
    only = parser.parse_args().only.split(",")
    start = time.monotonic()
    run.reference_run()
    for codec in ("lossless", "safe"):
        if codec in only:
            run.two_engines(codec)
    if "poisoned" in only:
        run.poisoned()
    if "faults" in only:
        run.faults()
    print(f"{time.monotonic() - start:.0f} s; logs of the engines: {run.work}", flush=True)
    print(f"{run.check.passed} passed, {run.check.failed} failed", flush=True)
    if run.check.failed == 0:
        shutil.rmtree(run.work)
    sys.exit(run.check.failed > 0)


main()
