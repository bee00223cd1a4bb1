#!/usr/bin/env python3
"""The admin page in a real browser: a daemon under load, headless Chromium, what the page shows.

    tests/e2e/admin_page.py [--build DIR] [--screenshot FILE] [--seconds N]

Starts kvstowd with a memory and a disk tier, lets a client put and get, opens the page and waits
until its tables and plots have what the load must bring. Anything that the page asks of another
host, any message of its script and any breach of its Content-Security-Policy is a failure.

Ends with 0, or 1 and the reason, or 77 where there is no Chromium (Debian: `chromium`).
"""

import argparse
import base64
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
START_TIMEOUT_S = 60
PAGE_TIMEOUT_S = 90

# What must be on the page; each is a JavaScript expression that must become true.
EXPECTED = {
    "both tiers hold blocks": """['dram', 'nvme'].every((name) => [...document.querySelectorAll(
        '#tiers tbody tr')].some((row) => row.cells[0].textContent === name &&
        Number(row.cells[1].textContent) > 0))""",
    "more than one codec is listed": "document.querySelectorAll('#codecs tbody tr').length >= 2",
    "Put and Get are counted": """['Put', 'Get'].every((name) => [...document.querySelectorAll(
        '#methods tbody tr')].some((row) => row.cells[0].textContent === name))""",
    "four plots have curves": """document.querySelectorAll('#plots figure').length === 4 &&
        [...document.querySelectorAll('#plots figure')].every((figure) =>
            [...figure.querySelectorAll('polyline')].some((line) =>
                line.getAttribute('points').split(' ').length >= 5))""",
    "blocks are found": """document.querySelector('#plots figcaption i.c0').textContent.match(
        /[1-9][0-9.]* %/) !== null""",
}


class Failed(Exception):
    pass


class Browser:
    """Chromium over its debugging pipe: one page, its events kept."""

    def __init__(self, program, folder):
        to_browser, self.write_fd = os.pipe()
        self.read_fd, from_browser = os.pipe()

        def place_pipes():
            # Away from 3 and 4 first: one of them may be in the other's place.
            a, b = os.dup(to_browser), os.dup(from_browser)
            a, b = os.dup2(a, 63), os.dup2(b, 64)
            os.dup2(a, 3)
            os.dup2(b, 4)

        arguments = [program, "--headless=new", "--remote-debugging-pipe", "--disable-gpu",
                     "--no-first-run", "--disable-extensions", "--disable-background-networking",
                     "--disable-dev-shm-usage", "--hide-scrollbars",
                     f"--user-data-dir={folder}/chromium", "about:blank"]
        if os.geteuid() == 0:
            arguments.insert(1, "--no-sandbox")  # it refuses to run as root with one
        self.process = subprocess.Popen(
            arguments, pass_fds=(3, 4, to_browser, from_browser), preexec_fn=place_pipes,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=open(f"{folder}/chromium.log", "wb"))
        os.close(to_browser)
        os.close(from_browser)
        self.buffer = b""
        self.events = []
        self.last_id = 0
        self.session = None

    def call(self, method, timeout_s=30, **parameters):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write_fd, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout_s
        while True:
            answer = self.receive(end)
            if answer.get("id") != self.last_id:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise Failed(f"chromium: {method}: {answer['error']}")
            return answer["result"]

    def receive(self, end):
        while b"\0" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.read_fd], [], [], left)[0]:
                raise Failed("chromium does not answer")
            piece = os.read(self.read_fd, 1 << 20)
            if not piece:
                raise Failed("chromium has ended")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, url, width, height):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            return None  # not there yet
        return result["result"].get("value")

    def screenshot(self):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        return base64.b64decode(shot["data"])

    def complaints(self, origin):
        """What the page must not do: other hosts, exceptions, entries in the log."""
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith((origin, "data:", "about:")):
                    found.append(f"asked for {url}")
            elif method == "Runtime.exceptionThrown":
                found.append(f"exception: {parameters['exceptionDetails'].get('text')}")
            elif method == "Log.entryAdded":
                entry = parameters["entry"]
                if "favicon.ico" not in entry.get("url", ""):
                    found.append(f"log: {entry.get('text')}")
        return found

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.write_fd)
        os.close(self.read_fd)


def start_daemon(build, folder):
    daemon = subprocess.Popen(
        [f"{build}/service/kvstowd", f"--listen.unix_socket={folder}/kvstow.sock", "--listen.tcp=",
         "--metrics.address=127.0.0.1:0", "--dram.capacity=96MiB", f"--nvme.path={folder}/nvme",
         "--nvme.capacity=512MiB"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=open(f"{folder}/daemon.log", "wb"))
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and daemon.poll() is None:
        text = pathlib.Path(f"{folder}/daemon.log").read_text()
        ready = re.search(r"ready .*metrics=(\S+)", text)
        if ready:
            return daemon, ready.group(1)
        time.sleep(0.05)
    daemon.kill()
    daemon.wait()
    raise Failed("the daemon did not become ready:\n" + text)


def start_load(build, folder):
    """A client of the soak test: puts, gets, lookups and deletes until it is killed."""
    return subprocess.Popen(
        [f"{build}/tests/e2e/soak_client", "mixed", f"unix:{folder}/kvstow.sock", "shm", "7"],
        stdin=subprocess.DEVNULL, stdout=open(f"{folder}/load.log", "wb"), stderr=subprocess.STDOUT)


def look(browser, address, seconds):
    """Waits until the page shows everything; then a little more, for the plots."""
    origin = f"http://{address}/"
    browser.open(origin, 1120, 1180)
    end = time.monotonic() + PAGE_TIMEOUT_S
    missing = dict(EXPECTED)
    while missing:
        missing = {what: test for what, test in missing.items() if browser.evaluate(test) is not True}
        if missing and time.monotonic() > end:
            raise Failed("not on the page: " + "; ".join(missing) + "\n" +
                         str(browser.evaluate("document.body.innerText")))
        time.sleep(0.2)
    time.sleep(seconds)
    complaints = browser.complaints(origin)
    if complaints:
        raise Failed("the page complains: " + "; ".join(complaints))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default=str(ROOT / "build/dev"))
    parser.add_argument("--screenshot", help="write a PNG of the page here")
    parser.add_argument("--seconds", type=float, default=0, help="watch longer before the screenshot")
    options = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        print("admin_page: skipped: no chromium; Debian's package of that name has it")
        return SKIPPED
    folder = tempfile.mkdtemp()
    daemon = load = browser = None
    try:
        daemon, address = start_daemon(options.build, folder)
        load = start_load(options.build, folder)
        browser = Browser(program, folder)
        look(browser, address, options.seconds)
        if options.screenshot:
            pathlib.Path(options.screenshot).write_bytes(browser.screenshot())
        print(f"admin_page: {len(EXPECTED)} things are on the page, nothing from elsewhere, "
              "no complaint")
        return 0
    except Failed as failure:
        print(f"admin_page: {failure}")
        for name in ("chromium.log", "load.log", "daemon.log"):
            path = pathlib.Path(folder, name)
            if path.exists():
                print(f"--- {name}:\n" + "\n".join(path.read_text(errors="replace").split("\n")[-15:]))
        return 1
    finally:
        if browser is not None:
            browser.close()
        if load is not None:
            load.kill()
            load.wait()
        if daemon is not None:
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
