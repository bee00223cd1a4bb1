"""Two real vLLM engines over one kvstow sidecar: the same tokens, whatever happens to the sidecar.

check_vllm.py MODEL PROMPTS      (run.sh prepares both)

Prints a line per check and ends with `N passed, N failed`.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "python"))
from conftest import Daemon  # noqa: E402  (also finds the package)

import torch  # noqa: E402

import kvstow  # noqa: E402

NUM_TOKENS = 32
TOKENS_PER_BLOCK = 64
LOAD_TIMEOUT_S = 3.0  # while the daemon is killed and stopped
PATIENT_LOAD_TIMEOUT_S = 30.0  # where all is well, on a busy machine
LOOKUP_TIMEOUT_S = 0.5
SLACK_S = 2.0
EXIT_LIMIT_S = 120


class Engine:
    """A vllm_engine.py process."""

    def __init__(self, model, prompts, log, extra=None, one_by_one=False, num_tokens=NUM_TOKENS):
        command = [sys.executable, "-X", "faulthandler", str(FOLDER / "vllm_engine.py")]
        command += [model, prompts, str(num_tokens)]
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

    def num_recomputed(self):
        """Prompts whose promised tokens did not come and were computed, as the engine says it."""
        with open(self.log) as file:
            found = re.findall(r"KV load failure: (\d+) request", file.read())
        return sum(int(number) for number in found)

    def results(self, count):
        return [self.event("done") for _ in range(count)]

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its threads' stacks go to the log
            self.process.wait(30)
            raise RuntimeError(f"an engine did not end; see {self.log}")


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
        self.daemons = []

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
        self.num_recomputed = engine.num_recomputed()
        return results

    def daemon(self, *flags):
        folder = tempfile.mkdtemp(dir=self.work)
        self.daemons.append(Daemon(folder, *flags, dram="2GiB"))
        return self.daemons[-1].start()

    def extra(self, daemon, codec, load_timeout=PATIENT_LOAD_TIMEOUT_S):
        return {
            "target": daemon.target,
            "codec": codec,
            "load_timeout": load_timeout,
            "lookup_timeout": LOOKUP_TIMEOUT_S,
            # On a busy machine the last prompts take their time; the next engine wants them all.
            "save_timeout": 60.0,
            "shutdown_timeout": 60.0,
        }

    # --- the checks ---

    def reference_run(self):
        print(f"{self.count} prompts x {NUM_TOKENS} tokens, without a connector", flush=True)
        self.reference = self.serve()
        lengths = [len(r["prompt_tokens"]) for r in self.reference]
        print(f"  prompts of {min(lengths)} to {max(lengths)} tokens", flush=True)

    def fill(self, daemon, codec):
        first = self.serve(self.extra(daemon, codec))
        same = equal(first, self.reference)
        self.check(
            same == self.count,
            f"the first engine: {same} of {self.count} prompts as without a connector",
        )
        with kvstow.Client(daemon.target) as client:
            stat = client.stat()
        print(f"  {stat.num_blocks} blocks stored: {stat.codecs}", flush=True)

    def take(self, extra):
        """A second engine's results; some of every prompt came from the store."""
        second = self.serve(extra)
        cached = [r["cached"] for r in second]
        self.check(
            min(cached) > 0,
            f"the second engine took {min(cached)} to {max(cached)} tokens of each prompt from "
            f"the store, {sum(cached)} in all",
        )
        self.check(
            self.num_recomputed == 0,
            f"{self.num_recomputed} prompts computed what the store had promised",
        )
        return second

    def two_engines(self, daemon, codec):
        print(f"two engines, one store, codec {codec}", flush=True)
        second = self.take(self.extra(daemon, codec))
        same, first_same = equal(second, self.reference), first_equal(second, self.reference)
        text = (
            f"{same} of {self.count} prompts equal in all {NUM_TOKENS} tokens, "
            f"{first_same} in the first"
        )
        wanted = self.count if codec == "lossless" else 0
        self.check(same >= wanted and first_same >= 29 * self.count // 32, text)

    def two_sidecars(self, daemon, codec):
        """The second engine beside a sidecar of its own, which asks the first one's."""
        print(f"two engines, a sidecar beside each, codec {codec}", flush=True)
        other = self.daemon(f"--peers.list={daemon.target}")
        second = self.take(self.extra(other, codec))
        same = equal(second, self.reference)
        self.check(
            same == self.count, f"{same} of {self.count} prompts equal in all {NUM_TOKENS} tokens"
        )
        with kvstow.Client(other.target) as client:
            fetched = client.stat().counters["peer_fetched"]
        wanted = sum(r["cached"] for r in second) // TOKENS_PER_BLOCK
        self.check(fetched >= wanted, f"{fetched} blocks came from the other sidecar, {wanted} used")
        other.kill()

    def demo(self, codec):
        """Time to the first token on the decode side, computed and handed over."""

        def serve_one_by_one(extra=None):
            engine = self.engine(extra=extra, one_by_one=True, num_tokens=1)
            engine.event("ready")
            results = []
            for _ in range(self.count):
                engine.next_prompt()
                results.append(engine.event("done"))
            engine.end()
            return results

        def median_ms(results):
            return 1000 * statistics.median(r["seconds"] for r in results)

        print("decode engine alone: every prompt is computed", flush=True)
        alone = serve_one_by_one()
        print("prefill engine, beside its sidecar", flush=True)
        prefill_side = self.daemon()
        serve_one_by_one(self.extra(prefill_side, codec))
        with kvstow.Client(prefill_side.target) as client:
            stored = client.stat()
        print("decode engine, beside its own sidecar, which asks the other", flush=True)
        decode_side = self.daemon(f"--peers.list={prefill_side.target}")
        handed = serve_one_by_one(self.extra(decode_side, codec))
        with kvstow.Client(decode_side.target) as client:
            counters = client.stat().counters
        wire = sum(codec["record_bytes"] for codec in stored.codecs.values())
        logical = sum(codec["logical_bytes"] for codec in stored.codecs.values())
        path = "shared memory" if counters["get_channel_bytes"] > 0 else "gRPC"
        same = first_equal(handed, alone)
        print(f"""
  prompts                         {self.count}, {sum(len(r["prompt_tokens"]) for r in alone)} tokens
  taken from the prefill side     {sum(r["cached"] for r in handed)} tokens
  time to first token, computed   {median_ms(alone):.0f} ms (median)
  time to first token, handed     {median_ms(handed):.0f} ms
  codec                           {codec}
  KV                              {logical / 1e6:.1f} MB, {wire / 1e6:.1f} MB between the sidecars (gRPC)
  decode engine to its sidecar    {path}, {counters["get_channel_bytes"] / 1e6:.1f} MB
  blocks that the peer sent       {counters["peer_fetched"]}
""")
        self.check(min(r["cached"] for r in handed) > 0, "some of every prompt came from the store")
        wanted = self.count if codec == "lossless" else 29 * self.count // 32
        self.check(same >= wanted, f"{same} of {self.count} first tokens as computed")

    def poisoned(self, daemon):
        print("negative control: zeros under the right keys", flush=True)
        namespace = "poisoned"
        with kvstow.Client(daemon.target) as client:
            model = client.get_model(next(client.list_blocks()).fingerprint)
            dtype = {"f32": torch.float32, "opaque": torch.uint8}[model.spec.kv_dtype]
            for done in self.reference:
                tokens = done["prompt_tokens"]
                layers = [
                    tuple(
                        torch.zeros(len(tokens), heads, dim, dtype=dtype) if dim else None
                        for dim in (k_dim, v_dim)
                    )
                    for heads, k_dim, v_dim in model.layer_shapes
                ]
                tenant = f"{len(namespace)}:{namespace}"
                client.put(model, tokens, layers, codec="raw", tenant=tenant)
        second = self.take({**self.extra(daemon, "lossless"), "namespace": namespace})
        same = equal(second, self.reference)
        self.check(
            same <= self.count // 4,
            f"{same} of {self.count} prompts equal: the comparison sees wrong planes",
        )

    def faults(self, daemon):
        print("the daemon is killed, stopped, restarted while prompts are served", flush=True)
        extra = self.extra(daemon, "lossless", LOAD_TIMEOUT_S)
        engine = self.engine(extra=extra, one_by_one=True)
        engine.event("ready")
        plan = {
            4: ("killed", daemon.kill),
            8: ("restarted", daemon.start),
            14: ("stopped", lambda: daemon.signal(signal.SIGSTOP)),
            20: ("continued", lambda: daemon.signal(signal.SIGCONT)),
            24: ("killed", daemon.kill),
            26: ("restarted", daemon.start),
        }
        results, state = [], "running"
        for i in range(self.count):
            engine.next_prompt()
            if i in plan:  # while the prompt is being served
                state, act = plan[i]
                act()
            done = engine.event("done")
            results.append(done)
            print(
                f"  prompt {i}: daemon {state}, {done['cached']} cached, {done['seconds']} s, "
                f"{done['waited']} s of it for the sidecar",
                flush=True,
            )
        engine.end()
        same = equal(results, self.reference)
        self.check(same == self.count, f"{same} of {self.count} prompts with the right tokens")
        # What the sidecar cost a prompt: time in hooks and waiting for lookups. The rest is the
        # engine's own, and depends on what else the machine does.
        limit = LOOKUP_TIMEOUT_S + LOAD_TIMEOUT_S + SLACK_S
        longest = max(r["waited"] for r in results)
        self.check(
            longest <= limit,
            f"the longest wait for the sidecar was {longest} s; limit {limit} s: the two "
            f"deadlines and {SLACK_S} s",
        )

    def all(self, only):
        self.reference_run()
        if set(only) & {"lossless", "sidecars", "poisoned", "faults"}:
            daemon = self.daemon()
            self.fill(daemon, "lossless")
            if "lossless" in only:
                self.two_engines(daemon, "lossless")
            if "sidecars" in only:
                self.two_sidecars(daemon, "lossless")
            if "poisoned" in only:
                self.poisoned(daemon)
            if "faults" in only:
                self.faults(daemon)
            daemon.kill()
        if "safe" in only:
            daemon = self.daemon()
            self.fill(daemon, "safe")
            self.two_engines(daemon, "safe")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--only", default="lossless,sidecars,poisoned,faults,safe")
    parser.add_argument("--demo", metavar="CODEC", help="times of a hand-over instead of checks")
    arguments = parser.parse_args()
    run = Run(arguments)
    start = time.monotonic()
    try:
        if arguments.demo:
            run.demo(arguments.demo)
        else:
            run.all(arguments.only.split(","))
    finally:
        for daemon in run.daemons:
            daemon.kill()
    print(f"{time.monotonic() - start:.0f} s; logs of the engines: {run.work}", flush=True)
    print(f"{run.check.passed} passed, {run.check.failed} failed", flush=True)
    if run.check.failed == 0:
        shutil.rmtree(run.work)
    sys.exit(run.check.failed > 0)


main()
