"""Holds: the package has the files that it promises, no loader finds the library by accident, and C programs can be built with it."""

import ast
import importlib.metadata
import pathlib

from scene import ROOT, Scene

import windlass


class Files(Scene):
    def test_files(self):
        """Everything in the list of files is there, licences and types among it."""
        files = importlib.metadata.files("windlass")
        self.assertTrue(all(file.locate().exists() for file in files))
        names = {file.name for file in files}
        for name in ["py.typed", "LICENSE-MIT", "LICENSE-APACHE", "LICENSES-THIRD-PARTY", "nccl.h", "windlass.h"]:
            self.assertIn(name, names)
        self.assertFalse([name for name in names if name.startswith("libnccl")])
        self.assertTrue(pathlib.Path(windlass.include(), "windlass.h").exists())
        self.assertIsNone(importlib.metadata.requires("windlass"))

    def test_old_python(self):
        """Python 3.8 can read every file."""
        for file in pathlib.Path(windlass.__file__).parent.glob("*.py"):
            ast.parse(file.read_text(), feature_version=(3, 8))

    def test_cmake(self):
        """A project that says find_package(Windlass) builds, and reaches the real library through Windlass."""
        build = self.folder / "cmake"
        consumer = ROOT / "ctests" / "consumers" / "package"
        for step in [["-S", consumer, "-B", build, f"-DCMAKE_PREFIX_PATH={windlass.cmake()}"], ["--build", build]]:
            result = self.run_program("cmake", *step)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        told = self.passed(self.run_program(build / "consumer", LD_LIBRARY_PATH="", WINDLASS_NCCL=str(self.nccl)))
        self.assertRegex(told, r"^0 2\d{4}\n$")
