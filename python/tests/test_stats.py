"""Holds: `stats` gives the counters of this process and of others, in the form that its types state."""

import json
import os
import subprocess
import sys

from scene import HERE, Scene

import windlass

PROGRAM = """
import calls, json, sys, windlass
windlass.enable()
calls.all_reduce()
print(json.dumps(windlass.stats()), flush=True)
sys.stdin.read()
"""


class Stats(Scene):
    def test_own_and_others(self):
        """A process counts itself as another process counts it."""
        (self.folder / "program.py").write_text(PROGRAM)
        child = subprocess.Popen([sys.executable, str(self.folder / "program.py")], env=self.environment(),
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            own = json.loads(child.stdout.readline())
            other = windlass.stats(child.pid)
        finally:
            child.communicate()
        self.assertEqual(own, other)
        self.assertEqual((own["process"], own["communicators_made"]), (child.pid, 1))
        communicator = own["communicators"][0]
        self.assertEqual((communicator["rank"], communicator["ranks"], communicator["state"]), (0, 1, "ended"))
        calls = [call for call in communicator["calls"] if call["function"] == "ncclAllReduce"]
        self.assertEqual([(call["calls"], call["bytes"]) for call in calls], [(1, 32)])
        self.assertLessEqual(set(own), set(windlass.Stats.__annotations__))
        self.assertLessEqual(set(communicator), set(windlass.Communicator.__annotations__))
        self.assertEqual(set(calls[0]) | {"native_below"}, set(windlass.Calls.__annotations__))

    def test_refusals(self):
        """Where nothing is counted the reason is told."""
        for process, word in [(None, "no NCCL is loaded"), (os.getpid(), "windlass run"), (1, "has no counters")]:
            with self.assertRaisesRegex(windlass.Error, word):
                windlass.stats(process)
        script = """
            import ctypes, windlass
            ctypes.CDLL("libnccl.so.2")
            try:
                windlass.stats()
            except windlass.Error as error:
                print(error)
        """
        self.assertIn(f"calls go to {self.nccl}", self.passed(self.run_script(script)))

    def test_every_field_is_typed(self):
        """Each field that the library writes has its type here."""
        source = (HERE.parents[1] / "crates" / "base" / "src" / "stats" / "snapshot.rs").read_text()
        for structure, types in [("Snapshot", windlass.Stats), ("CommunicatorCounts", windlass.Communicator),
                                 ("CallCounts", windlass.Calls)]:
            body = source.split(f"pub struct {structure} {{")[1].split("\n}")[0]
            fields = {line.split(":")[0].split()[-1] for line in body.splitlines() if line.strip().startswith("pub ")}
            self.assertEqual(fields, set(types.__annotations__), structure)
