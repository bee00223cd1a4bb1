"""Prints the requirements of a wheel that apply here, but for torch and what goes with it.

requirements_of.py WHEEL
"""

import email
import sys
import zipfile

from packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
for line in metadata.get_all("Requires-Dist") or []:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        continue
    if requirement.name in ("torch", "torchvision", "torchaudio"):
        continue
    requirement.marker = None
    print(requirement)
