"""What the tests share: the build under test, a real daemon, the bundled KV of a real model."""

import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVSTOW_BUILD_DIR", ROOT / "build" / "dev"))
sys.path.insert(0, str(BUILD / "client" / "python"))

import kvstow  # noqa: E402

KVSTOWD = BUILD / "service" / "kvstowd"
CLI = BUILD / "client" / "kvstow"
FIXTURE = ROOT / "tests" / "data" / "smollm2_kv.safetensors"
READY_LIMIT_S = 60


class Daemon:
    """A real kvstowd and its life. The socket is <folder>/kvstow.sock."""

    def __init__(self, folder, *flags, dram="64MiB", nvme=None):
        self.socket = f"{folder}/kvstow.sock"
        self.target = f"unix:{self.socket}"
        self.argv = [
            str(KVSTOWD),
            f"--listen.unix_socket={self.socket}",
            f"--dram.capacity={dram}",
            "--drain_timeout=1s",
            *flags,
        ]
        if nvme:
            self.argv += [f"--nvme.path={folder}/nvme", f"--nvme.capacity={nvme}"]
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            self.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines = []
        overdue = threading.Timer(READY_LIMIT_S, self.process.kill)
        overdue.start()
        for line in self.process.stdout:
            lines.append(line)
            if "ready " in line:
                break
        overdue.cancel()
        assert any("ready " in line for line in lines), "".join(lines)
        # The pipe is read on, so that the daemon never waits for its log.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        return self

    def signal(self, number):
        self.process.send_signal(number)

    def stop_all_threads(self):
        """SIGSTOP, and waits until every thread stands still."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path).start()
    yield daemon
    daemon.kill()


@pytest.fixture
def client(daemon):
    with kvstow.Client(daemon.target) as client:
        yield client


class Fixture:
    """tests/data/smollm2_kv.safetensors: 256 tokens of a real model, bf16 as uint16."""

    def __init__(self, path=FIXTURE):
        import numpy

        raw = pathlib.Path(path).read_bytes()
        (header_bytes,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + header_bytes])
        metadata = header.pop("__metadata__")
        types = {"BF16": "<u2", "I32": "<i4"}
        tensors = {}
        for name, info in header.items():
            begin, end = (8 + header_bytes + offset for offset in info["data_offsets"])
            flat = numpy.frombuffer(raw[begin:end], types[info["dtype"]])
            tensors[name] = flat.reshape(info["shape"])
        self.layers = [(tensors[f"k.{i}"], tensors[f"v.{i}"]) for i in range(30)]
        if "token_ids" not in tensors:  # fetched by key
            return
        self.tokens = tensors["token_ids"]
        layout = metadata["rope_layout"].replace("half-split", "half")
        # As the command line makes it of the file.
        self.spec = kvstow.ModelSpec.uniform(
            metadata["model"],
            "sha256:" + metadata["weights_sha256"],
            num_layers=30,
            num_kv_heads=3,
            head_dim=64,
            rope=f"base={float(metadata['rope_base']):.17g},{layout}",
            tokenizer=metadata.get("tokenizer", ""),
        )

    def empty_layers(self):
        import numpy

        return [(numpy.zeros_like(k), numpy.zeros_like(v)) for k, v in self.layers]


@pytest.fixture(scope="session")
def kv():
    pytest.importorskip("numpy", reason="numpy is not installed: no arrays to put")
    return Fixture()


def same(layers, expected):
    return all((a == b).all() for pair, want in zip(layers, expected) for a, b in zip(pair, want))


def eventually(call, limit_s=20):
    """What `call` answers once the service is reached."""
    limit = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except kvstow.UnavailableError:
            if time.monotonic() > limit:
                raise
