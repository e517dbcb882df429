"""What the tests of the package share: the simulator in the place of the real libraries, and processes over it."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

import windlass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INSTALLED = pathlib.Path(windlass.library()).parent


class Scene(unittest.TestCase):
    """A folder with the simulator's libraries under the names of the real ones."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="windlass-package-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        (cls.folder / "libcuda.so.1").symlink_to(INSTALLED / "libsim_cuda.so")
        cls.nccl = cls.folder / "libnccl.so.2"
        cls.nccl.symlink_to(INSTALLED / "libsim_nccl.so")

    def environment(self, **variables):
        """That of a user who has only this Python and the simulator."""
        kept = {name: os.environ[name] for name in ["HOME", "TMPDIR"] if name in os.environ}
        path = os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin", "/bin"])
        return {**kept, "PATH": path, "LD_LIBRARY_PATH": str(self.folder), "PYTHONPATH": str(HERE),
                "PYTHONDONTWRITEBYTECODE": "1", **variables}

    def run_program(self, *command, text="", **variables):
        """Runs a command to its end."""
        return subprocess.run([str(word) for word in command], env=self.environment(**variables), input=text, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=False)

    def run_script(self, script, *arguments, before=(), **variables):
        """Runs a script of Python from a file."""
        file = pathlib.Path(tempfile.mkstemp(suffix=".py", dir=str(self.folder))[1])
        file.write_text(textwrap.dedent(script))
        return self.run_program(*before, sys.executable, file, *arguments, **variables)

    def passed(self, result):
        """The output of a command that must have succeeded without a word on standard error."""
        self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout)
        return result.stdout
