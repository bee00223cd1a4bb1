"""Follows the container's recipe without a container engine, and runs what comes out of it.

    container.py --work FOLDER [--ccache FOLDER]

A stage is a folder made by debootstrap (what debian:12-slim is made from), RUN a shell in a chroot,
COPY a copy. Needs root. Runs itself in a mount namespace of its own, so that no mount outlives it
and the folder can be removed without touching what was mounted.
"""
import argparse
import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import recipe
from manifests import ROOT

RUN_SECONDS = 3000
START_SECONDS = 120
STOP_SECONDS = 60
passed, failed = 0, 0


def say(text):
    print(text, flush=True)


def check(claim, holds, detail=""):
    global passed, failed
    if holds:
        passed += 1
        say(f"  ok      {claim}")
    else:
        failed += 1
        say(f"  FAILED  {claim}\n{detail}")


def call(*command, **options):
    return subprocess.run(command, check=True, **options)


def bind(source, target, *options):
    os.makedirs(target, exist_ok=True)
    call("mount", "--bind", source, target)
    if options:
        call("mount", "-o", ",".join(("remount", "bind") + options), target)


# --- building ---

def debian(work):
    """A Debian 12 of the packages that every system has, once per work folder."""
    root = os.path.join(work, "debian-12")
    if not os.path.exists(os.path.join(root, "etc", "debian_version")):
        say("debootstrap: Debian 12, minbase")
        with open(os.path.join(work, "debootstrap.log"), "w", encoding="utf-8") as log:
            call("debootstrap", "--variant=minbase", "bookworm", root + ".part", mirror(),
                 stdout=log, stderr=subprocess.STDOUT)
        os.rename(root + ".part", root)
    return root


def mirror():
    """The address of the machine's own Debian source."""
    folder = "/etc/apt/sources.list.d"
    names = ["/etc/apt/sources.list"] + [os.path.join(folder, n) for n in os.listdir(folder)]
    for name in filter(os.path.exists, names):
        with open(name, encoding="utf-8") as stream:
            for address in re.findall(r"(?:^deb\s(?:\[.*\]\s)?|^URIs:\s*)(\S*debian\S*)",
                                      stream.read(), re.MULTILINE):
                if "security" not in address:
                    return address
    return "http://deb.debian.org/debian"


def use_network_of_host(root):
    """What a container engine gives to RUN: how this machine finds hosts and fetches packages."""
    for path in ("/etc/resolv.conf", "/etc/hosts"):
        if os.path.exists(path):
            shutil.copyfile(path, root + path)
    folder = "/etc/apt/apt.conf.d/"
    for name in os.listdir(folder):
        with open(folder + name, encoding="utf-8") as stream:
            if "Acquire::" in stream.read():
                shutil.copy(folder + name, root + folder)


def build(work, ccache):
    """Follows every stage; returns the last one's folder."""
    roots = {}
    for stage in recipe.stages():
        if stage.image != "debian:12-slim":
            raise ValueError(f"the recipe starts from {stage.image}, which is not made here")
        root = os.path.join(work, "stage-" + stage.name.replace(" ", "-"))
        shutil.rmtree(root, ignore_errors=True)
        call("cp", "-a", debian(work), root)
        use_network_of_host(root)
        follow(stage, root, roots, ccache)
        roots[stage.name] = root
    return root


def follow(stage, root, roots, ccache):
    call("mount", "-t", "proc", "proc", root + "/proc")
    bind("/dev", root + "/dev")
    if ccache and stage.name == "build":
        bind(ccache, root + "/root/.cache/ccache")
    folder = "/"
    copied = iter(recipe.copies(stage))
    for name, rest in stage.steps:
        started = time.monotonic()
        if name == "WORKDIR":
            folder = rest
            os.makedirs(root + folder, exist_ok=True)
        elif name == "COPY":
            copy(next(copied), root, folder, roots)
        else:
            shell(root, folder, rest)
        say(f"{stage.name}: {name} {rest[:60]} ({time.monotonic() - started:.0f} s)")
    for path in ("/root/.cache/ccache", "/dev", "/proc"):
        if os.path.ismount(root + path):
            call("umount", root + path)


def shell(root, folder, script):
    """RUN: as root, in `folder`, with the environment of a new container."""
    done = subprocess.run(
        ["chroot", root, "/usr/bin/env", "-i", "HOME=/root",
         "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
         "/bin/sh", "-c", f"cd {shlex.quote(folder)} && {script}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"RUN {script}\n{done.stdout[-6000:]}")


def copy(step, root, folder, roots):
    origin, sources, destination = step
    target = os.path.join(root + folder, destination) if not destination.startswith("/") \
        else root + destination
    if origin is not None:
        os.makedirs(target, exist_ok=True)
        for source in sources:
            call("cp", "-a", roots[origin] + source + "/.", target)
        return
    for source in sources:
        for path in recipe.context():
            if source == ".":
                place = os.path.join(target, path)
            elif path == source:
                place = os.path.join(target, os.path.basename(path))
            else:
                continue
            os.makedirs(os.path.dirname(place), exist_ok=True)
            shutil.copy2(os.path.join(ROOT, path), place)


# --- running ---

def snapshot(root):
    """What there is outside the volumes: every path with its kind, size, owner and times."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders
                      if not os.path.ismount(os.path.join(folder, name))]
        for name in folders + files:
            info = os.lstat(os.path.join(folder, name))
            found[os.path.relpath(os.path.join(folder, name), root)] = (
                info.st_mode, info.st_size, info.st_uid, info.st_mtime_ns, info.st_ctime_ns)
    return found


class Image:
    """The last stage as a running container sees it: root read-only, volumes of a random user."""

    def __init__(self, root, work, volumes):
        self.root = os.path.join(work, "run")
        self.user = random.randint(100000, 2000000000)
        bind(root, self.root, "ro", "nosuid", "nodev")
        call("mount", "-t", "proc", "proc", self.root + "/proc")
        call("mount", "--bind", "/dev", self.root + "/dev")
        bind(os.path.join(ROOT, "tests", "data"), self.root + "/mnt", "ro")
        for volume in volumes:
            call("mount", "-t", "tmpfs", "-o", f"uid={self.user},gid={self.user},mode=0700",
                 "tmpfs", self.root + volume)

    def command(self, *command):
        """`command` in the image as the random user, with no right at all, as PID 1."""
        return ["unshare", "--pid", "--fork", "--kill-child", "chroot", self.root,
                "setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups",
                "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all",
                "env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin"] + list(command)

    def run(self, *command):
        return subprocess.run(self.command(*command), capture_output=True, text=True, timeout=120)

    def close(self):
        call("umount", "--recursive", self.root)


@contextlib.contextmanager
def running(image, settings):
    """The image's own program with its own arguments, ready. Yields (process, lines of its log)."""
    process = subprocess.Popen(image.command(*settings["ENTRYPOINT"], *settings["CMD"]),
                               stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    lines = []
    for line in process.stderr:
        lines.append(line)
        if " ready " in line:
            break
    watchdog.cancel()
    reader = threading.Thread(target=lambda: lines.extend(process.stderr))
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def first_process(process):
    """The program under `unshare --fork`."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="utf-8") as stream:
        return int(stream.read().split()[0])


def judge_contents(root):
    packages = subprocess.run(["chroot", root, "dpkg-query", "-W", "-f=${Package}\n"],
                              capture_output=True, text=True, check=True).stdout.split()
    extra = [name for name in packages if re.match(r"(g\+\+|gcc|cmake|ninja|git|ccache|make)", name)
             and not name.endswith("-base")]
    check("the image has no tool of the build", not extra, extra)
    bare = subprocess.run(["chroot", root, "sh", "-c", "ls -A /var/lib/apt/lists /src /out"],
                          capture_output=True, text=True).stdout
    check("no package lists and no sources stay in the image", "Packages" not in bare
          and "CMakeLists" not in bare, bare)
    size = subprocess.run(["du", "-sm", root], capture_output=True, text=True).stdout.split()[0]
    say(f"          {len(packages)} packages, {size} MB")


def judge_run(root, work):
    settings = recipe.stages()[-1].settings
    before = snapshot(root)
    image = Image(root, work, settings["VOLUME"])
    target = "--target=unix:/run/kvstow/kvstow.sock"
    data = "/mnt/smollm2_kv.safetensors"
    refused = image.run("sh", "-c", "echo x > /etc/kvstow/x")
    check("the root is read-only", "Read-only file system" in refused.stderr, refused.stderr)
    with running(image, settings) as (process, lines):
        check(f"kvstowd gets ready as user {image.user} with a read-only root",
              lines and " ready " in lines[-1], "".join(lines))
        for claim, command in (
                ("ping answers", ["ping", target]),
                ("doctor examines the machine from inside", ["doctor", target]),
                ("put is durable", ["put", data, "--codec", "raw", "--durable", target]),
                ("get gives every byte back", ["get", "--tokens-from", data, "--compare", data,
                                               "-o", "/run/kvstow/back.safetensors", target])):
            done = image.run("kvstow", *command)
            check(claim, done.returncode == 0, done.stdout + done.stderr)
        os.kill(first_process(process), getattr(signal, settings["STOPSIGNAL"]))
        check("the stop signal ends it with status 0, as process 1",
              process.wait(timeout=STOP_SECONDS) == 0, "".join(lines))
    written = {volume: os.listdir(image.root + volume) for volume in settings["VOLUME"]}
    check("the disk tier is in its volume", "rocksdb" in written["/var/lib/kvstow"], written)
    image.close()
    after = snapshot(root)
    changed = [path for path in sorted(set(before) | set(after))
               if before.get(path) != after.get(path)]
    check("U18: nothing outside the volumes was written", not changed, changed[:20])
    judge_missing_volume(root, work, settings)


def judge_missing_volume(root, work, settings):
    """The control: where a volume is missing, the write that needs it is refused and named."""
    image = Image(root, work, [settings["VOLUME"][0]])
    done = image.run(*settings["ENTRYPOINT"], *settings["CMD"])
    check("without its disk volume it does not start, and says which folder",
          done.returncode == 1 and settings["VOLUME"][1] in done.stderr, done.stderr)
    image.close()


def inside(work, ccache):
    root = build(work, ccache)
    check("every step of the recipe succeeds", True)
    judge_contents(root)
    judge_run(root, work)
    say(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--ccache", default="")
    parser.add_argument("--inside", action="store_true")
    args = parser.parse_args()
    work = os.path.abspath(args.work)
    if args.inside:
        return inside(work, args.ccache)
    os.makedirs(work, exist_ok=True)
    status = subprocess.run(["unshare", "--mount", "--propagation", "private", sys.executable, "-B",
                             os.path.abspath(__file__), "--inside"] + sys.argv[1:]).returncode
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        left = [line for line in stream if work in line]
    if left:
        say(f"mounts are left, so nothing is removed: {left}")
        return 1
    for name in os.listdir(work):
        if name.startswith("stage-") or name == "run":
            shutil.rmtree(os.path.join(work, name))
    return status


if __name__ == "__main__":
    sys.exit(main())
