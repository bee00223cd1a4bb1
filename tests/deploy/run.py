"""Runs the named test modules: run.py manifests daemon

The last line is `N passed, N failed, N skipped`. Status 77 when nothing ran: skipped, for ctest.
"""
import sys
import unittest

SKIPPED = 77


class Result(unittest.TextTestResult):
    """Counts what passed as well."""
    num_passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.num_passed += 1


def main(names):
    try:
        import yaml  # noqa: F401: all modules read YAML
    except ImportError:
        print("PyYAML is not installed: apt install python3-yaml")
        return SKIPPED
    suite = unittest.defaultTestLoader.loadTestsFromNames([f"{name}_test" for name in names])
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result).run(suite)
    failed = len(result.failures) + len(result.errors)
    print(f"{result.num_passed} passed, {failed} failed, {len(result.skipped)} skipped")
    if failed or not suite.countTestCases():
        return 1
    return 0 if result.num_passed else SKIPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
