"""Holds: the command of the package works by all its names, finds what it needs, and needs no GPU."""

import re
import sys

from scene import ROOT, Scene

import windlass


class Command(Scene):
    def test_version(self):
        """Package, command and workspace tell one version."""
        version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
        self.assertEqual(windlass.__version__, version)
        for command in [["windlass"], [sys.executable, "-m", "windlass"]]:
            self.assertIn(version, self.passed(self.run_program(*command, "--version")))

    def test_demo(self):
        """The demo runs on the simulator that the package brings."""
        demo = self.run_program("windlass", "demo", "--sim", "--ranks", "2")
        self.assertEqual(demo.returncode, 0, demo.stdout + demo.stderr)
        self.assertRegex(demo.stdout.splitlines()[-1], r"^demo: \d{3,} checks passed, 0 failed$")

    def test_run(self):
        """A program runs over Windlass, its code comes back, and a line says what ran where."""
        script = """
            import calls, sys, windlass
            calls.all_reduce()
            print(windlass.stats()["functions"]["ncclAllReduce"])
            sys.exit(3)
        """
        result = self.run_script(script, before=[sys.executable, "-m", "windlass", "run", "--"])
        line = "windlass: 1 process, 1 communicator, 0 of 1 calls in Windlass's kernels (on NCCL: it has one rank)\n"
        self.assertEqual((result.returncode, result.stdout, result.stderr), (3, "1\n", line))
