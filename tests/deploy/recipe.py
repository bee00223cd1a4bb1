"""The container's recipe as values: instructions, stages, and the files of the build's context."""
import json
import os
import re
import shlex
import subprocess

from manifests import ROOT

DOCKERFILE = os.path.join(ROOT, "deploy", "container", "Dockerfile")


def instructions():
    """[(NAME, rest)] of the Dockerfile, with lines joined and comments gone."""
    with open(DOCKERFILE, encoding="utf-8") as stream:
        lines = [line.rstrip("\n") for line in stream if not line.lstrip().startswith("#")]
    found, pending = [], ""
    for line in lines:
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if pending.strip():
            name, _, rest = pending.strip().partition(" ")
            found.append((name.upper(), rest.strip()))
        pending = ""
    return found


class Stage:
    """One FROM and what follows it."""

    def __init__(self, image, name):
        self.image = image
        self.name = name
        self.steps = []     # (NAME, rest) of what changes the file system, and WORKDIR
        self.settings = {}  # USER, ENTRYPOINT, CMD, VOLUME, STOPSIGNAL


def stages():
    found = []
    for name, rest in instructions():
        if name == "FROM":
            image, _, alias = re.match(r"(\S+)(\s+AS\s+(\S+))?$", rest, re.IGNORECASE).groups()
            found.append(Stage(image, alias or f"stage {len(found)}"))
        elif name in ("RUN", "COPY", "WORKDIR"):
            found[-1].steps.append((name, rest))
        elif name in ("USER", "ENTRYPOINT", "CMD", "VOLUME", "STOPSIGNAL"):
            value = json.loads(rest) if rest.startswith("[") else rest
            found[-1].settings[name] = value
        elif name != "LABEL":
            raise ValueError(f"the recipe uses {name}, which the test does not follow")
    return found


def copies(stage):
    """[(stage copied from or None, [sources], destination)]"""
    found = []
    for name, rest in stage.steps:
        if name == "COPY":
            words = shlex.split(rest)
            flags = [word for word in words if word.startswith("--")]
            words = words[len(flags):]
            origin = flags[0].removeprefix("--from=") if flags else None
            found.append((origin, words[:-1], words[-1]))
    return found


def installed_packages(stage):
    """What apt-get install names in the stage."""
    for name, rest in stage.steps:
        match = re.search(r"apt-get install (.*?)&&", rest) if name == "RUN" else None
        if match:
            return [word for word in match[1].split() if not word.startswith("-")]
    return []


def ignore_rules():
    with open(os.path.join(ROOT, ".dockerignore"), encoding="utf-8") as stream:
        lines = [line.strip() for line in stream]
    return [line for line in lines if line and not line.startswith("#")]


def is_ignored(path, rules):
    """Docker's order: the last rule that names the path or a folder above it decides."""
    parts = path.split("/")
    names = ["/".join(parts[:i + 1]) for i in range(len(parts))]
    ignored = False
    for rule in rules:
        pattern = re.escape(rule.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, name) for name in names):
            ignored = not rule.startswith("!")
    return ignored


def tree():
    """Every file that git knows or would add."""
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.splitlines() if os.path.exists(os.path.join(ROOT, path))]


def context():
    rules = ignore_rules()
    return [path for path in tree() if not is_ignored(path, rules)]
