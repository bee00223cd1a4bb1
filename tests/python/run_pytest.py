"""Runs pytest on one file of this folder. Without pytest: says so and ends with 77, which ctest
counts as skipped."""

import pathlib
import sys

try:
    import pytest
except ImportError:
    print(f"skipped: {sys.executable} has no pytest; deploy/install_deps.sh --dev installs it")
    sys.exit(77)

folder = pathlib.Path(__file__).resolve().parent
arguments = ["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(folder)]
code = pytest.main(arguments + [str(folder / name) for name in sys.argv[1:]])
if code == pytest.ExitCode.NO_TESTS_COLLECTED:
    print("skipped: a module that these tests need is not installed; its name is above")
    code = 77
sys.exit(int(code))
