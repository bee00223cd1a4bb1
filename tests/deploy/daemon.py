"""The real programs, as processes."""
import os
import re
import signal
import subprocess
import tempfile
import threading

from manifests import ROOT

# Set by the runner: where kvstowd and kvstow are. Absolute, or from the root of the tree.
BUILD = os.path.join(ROOT, os.environ.get("KVSTOW_BUILD", "build/release"))
KVSTOWD = os.path.join(BUILD, "service", "kvstowd")
KVSTOW = os.path.join(BUILD, "client", "kvstow")
MISSING = None if os.path.exists(KVSTOWD) and os.path.exists(KVSTOW) else f"{BUILD} has no programs"
START_SECONDS = 60


class Daemon:
    """kvstowd with a configuration's text, its folders and sizes replaced by small ones here.

    with Daemon(text) as daemon:
        daemon.path("/run/kvstow/kvstow.sock")   # where a path of the pod is here
    """

    def __init__(self, config_text, folders=("/run/kvstow", "/var/lib/kvstow")):
        self.root = tempfile.TemporaryDirectory(prefix="kvstow-deploy-")
        self.folders = folders
        self.lines = []
        self.reader = None
        for folder in folders:
            os.makedirs(self.path(folder))
        self.config = os.path.join(self.root.name, "kvstowd.textproto")
        with open(self.config, "w", encoding="utf-8") as out:
            out.write(self.path(config_text))

    def path(self, text):
        """`text` with the pod's folders replaced by ours."""
        pattern = "|".join(re.escape(folder) for folder in self.folders)
        return re.sub(pattern, lambda match: self.root.name + match[0], text)

    def __enter__(self):
        small = ["--dram.capacity=64MiB", "--nvme.capacity=256MiB", "--limits.worker_threads=2",
                 "--limits.bytes_in_flight=64MiB", "--metrics.address=127.0.0.1:0"]
        self.process = subprocess.Popen([KVSTOWD, f"--config={self.config}"] + small,
                                        stderr=subprocess.PIPE, text=True)
        watchdog = threading.Timer(START_SECONDS, self.process.kill)
        watchdog.start()
        for line in self.process.stderr:
            self.lines.append(line)
            if " ready " in line:
                break
        watchdog.cancel()
        if not self.lines or " ready " not in self.lines[-1]:
            self.__exit__()
            raise RuntimeError("kvstowd did not become ready:\n" + "".join(self.lines))
        # Lines that nobody reads would fill the pipe in the end.
        self.reader = threading.Thread(target=self._keep_reading)
        self.reader.start()
        return self

    def _keep_reading(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def metrics_address(self):
        return re.search(r" metrics=(\S+)", "".join(self.lines))[1]

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, seconds):
        return self.process.wait(timeout=seconds)

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()
        if self.reader:
            self.reader.join()
        self.process.stderr.close()
        self.root.cleanup()


def run(command, seconds=60):
    """A command of a manifest: its program's name is that of the image."""
    programs = {"kvstow": KVSTOW, "kvstowd": KVSTOWD}
    return subprocess.run([programs.get(command[0], command[0])] + command[1:],
                          capture_output=True, text=True, timeout=seconds, cwd=ROOT)
