"""Holds: the plugins of vLLM and SGLang are where these look for them, cost nothing unless asked for, and refuse what they do not know."""

import importlib.metadata
import logging
import os
import unittest
from unittest import mock

from scene import Scene

from windlass import _plugins


class Plugins(unittest.TestCase):
    def said(self, name, plugin, value):
        """The lines of the log, after which the environment must be as before."""
        with mock.patch.dict(os.environ, {f"WINDLASS_{name.upper()}": value}), self.assertLogs(f"{name}.windlass", logging.INFO) as log:
            before = dict(os.environ)
            plugin()
            self.assertEqual(dict(os.environ), before)
        self.assertEqual(len(log.output), 1)
        return log.output[0]

    def test_intervals(self):
        """Both ends belong to an interval; an open one has no end; what is no interval is named."""
        self.assertEqual(_plugins.intervals("4K-64k, 8M-"), [(4096, 65536), (8 << 20, float("inf"))])
        self.assertEqual(_plugins.intervals("1-1,1G-2G"), [(1, 1), (1 << 30, 2 << 30)])
        for text in ["", "4K", "-4K", "64K-4K", "4K-64K,", "4T-", "4.5K-"]:
            with self.assertRaisesRegex(ValueError, "expected off, auto or intervals of bytes"):
                _plugins.intervals(text)

    def test_off(self):
        """Without the variable nothing is looked at."""
        for value in ["", "off", "OFF"]:
            with mock.patch.dict(os.environ, {"WINDLASS_VLLM": value, "WINDLASS_SGLANG": value}):
                with mock.patch.object(_plugins, "version", side_effect=AssertionError), self.nothing_logged():
                    _plugins.vllm()
                    _plugins.sglang()

    def test_refused(self):
        """A bad value, and a framework that is not there, change nothing; the line names the value and what was expected."""
        for name, plugin in [("vllm", _plugins.vllm), ("sglang", _plugins.sglang)]:
            self.assertRegex(self.said(name, plugin, "8M-4M"), r"=8M-4M changes nothing: '8M-4M', expected off, auto or intervals")
            self.assertIn(f"changes nothing: No package metadata was found for {name}", self.said(name, plugin, "8M-"))

    def nothing_logged(self):
        # unittest has this from Python 3.10 on.
        return mock.patch.object(logging.Logger, "handle", side_effect=AssertionError)


class EntryPoints(Scene):
    def test_entry_points(self):
        """The frameworks find the functions by the wheel's metadata, and finding them imports nothing of the frameworks."""
        found = {entry.group: entry.load() for entry in importlib.metadata.distribution("windlass").entry_points if entry.group != "console_scripts"}
        self.assertEqual(found, {"vllm.general_plugins": _plugins.vllm, "sglang.srt.plugins": _plugins.sglang})

    def test_cost(self):
        """The package itself imports no plugin."""
        self.passed(self.run_script("import sys, windlass; assert 'windlass._plugins' not in sys.modules"))


if __name__ == "__main__":
    unittest.main()
