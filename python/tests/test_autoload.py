"""Holds: windlass-autoload opens Windlass before NCCL where WINDLASS_PYTHON=on, and a program starts as ever where it cannot."""

import os
import importlib
import pathlib
import statistics
import subprocess
import sys
import unittest

import windlass
from scene import Scene

try:
    import windlass_autoload
except ImportError:
    windlass_autoload = None

# As PyTorch's library does: it needs NCCL by name, and has a path of its own to one.
TORCH = "int ncclGetVersion(int *); int version(void) { int version = 0; ncclGetVersion(&version); return version; }"
NCCL = "int ncclGetVersion(int *version) { *version = 22809; return 0; } int isReal(void) { return 1; }"
SCRIPT = """
    import ctypes, os
    if "BEFORE" in os.environ:
        ctypes.CDLL(os.environ["BEFORE"])
    print(ctypes.CDLL(os.environ["TORCH"]).version())
    print(any("libwindlass.so" in line for line in open("/proc/self/maps")))
    print(hasattr(ctypes.CDLL("libnccl.so.2"), "windlassGetVersion"))
"""


@unittest.skipUnless(windlass_autoload, "windlass-autoload is not installed here")
class Autoload(Scene):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        own = cls.folder / "own"
        own.mkdir()
        cls.torch, real = cls.folder / "libtorch_cuda.so", own / "libnccl.so.2"
        for source, library, flags in [(NCCL, real, ["-Wl,-soname,libnccl.so.2"]),
                                       (TORCH, cls.torch, [str(real), f"-Wl,-rpath,{own}"])]:
            file = library.with_suffix(".c")
            file.write_text(source)
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, file, *flags], check=True)
        cls.real = real

    def lines(self, script=SCRIPT, **variables):
        """What the script printed, and what standard error got."""
        result = self.run_script(script, LD_LIBRARY_PATH=str(self.real.parent), TORCH=str(self.torch), **variables)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout.splitlines(), result.stderr

    def test_asleep(self):
        """Without the variable, or with another value, nothing is opened or imported."""
        for variables in [{}, {"WINDLASS_PYTHON": "off"}, {"WINDLASS_PYTHON": ""}]:
            self.assertEqual(self.lines(**variables), (["22809", "False", "False"], ""))
            told, _ = self.lines("import sys; print('windlass_autoload' in sys.modules, 'ctypes' in sys.modules)", **variables)
            # From 3.15 on Python imports the module for its entry point.
            self.assertEqual(told[0].split(), [str(sys.version_info >= (3, 15)), "False"])

    def test_on(self):
        """A library that needs NCCL by its name gets Windlass, which finds the NCCL of that library's path. Children, too."""
        self.assertEqual(self.lines(WINDLASS_PYTHON="on"), (["22809", "True", "True"], ""))
        self.assertEqual(self.lines(WINDLASS_PYTHON="False"), (["22809", "False", "False"], ""))
        script = """
            import multiprocessing
            def child(queue):
                queue.put(any("libwindlass.so" in line for line in open("/proc/self/maps")))
            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get(timeout=60))
                process.join()
        """
        self.assertEqual(self.lines(script, WINDLASS_PYTHON="on"), (["True"], ""))

    def test_calls(self):
        """Calls run over Windlass: its counters have them."""
        script = "import calls, windlass; calls.all_reduce(); print(windlass.stats()['functions']['ncclAllReduce'])"
        self.assertEqual(self.passed(self.run_script(script, WINDLASS_PYTHON="on")).split(), ["1"])

    def test_preloaded(self):
        """What is preloaded stays: a second Windlass is not opened, and before another NCCL it is told that the variable came too late."""
        self.assertEqual(self.lines(WINDLASS_PYTHON="on", LD_PRELOAD=windlass.library())[1], "")
        self.assertEqual(self.lines(WINDLASS_PYTHON="yes")[1], "windlass: WINDLASS_PYTHON=yes has no effect: expected on or off, and off holds\n")
        told = "windlass: WINDLASS_PYTHON=on has no effect: another NCCL is loaded already\n"
        self.assertEqual(self.lines(WINDLASS_PYTHON="on", LD_PRELOAD=str(self.real)), (["22809", "False", "False"], told))
        silent = self.lines(WINDLASS_PYTHON="on", LD_PRELOAD=str(self.real), WINDLASS_LOG="off")
        self.assertEqual(silent, (["22809", "False", "False"], ""))

    def test_opened_by_path_before(self):
        """A program that opens the real NCCL by its path first: Windlass was there before, and serves who asks by name."""
        self.assertEqual(self.lines(WINDLASS_PYTHON="on", BEFORE=str(self.real)), (["22809", "True", "True"], ""))

    def test_swallowed(self):
        """Where the library cannot be opened, the program starts as ever, and is told."""
        copy = self.folder / "copy"
        copy.mkdir()
        (copy / "windlass_autoload.py").write_bytes(pathlib.Path(windlass_autoload.__file__).read_bytes())
        for broken in [False, True]:
            if broken:
                library = copy / "windlass" / "lib" / "windlass" / "libwindlass.so"
                library.parent.mkdir(parents=True)
                library.write_bytes(b"no library" * 100)
            script = f"""
                import sys
                sys.path[:] = [{str(copy)!r}] + [folder for folder in sys.path if not folder.endswith("site-packages")]
                import windlass_autoload
                windlass_autoload.start()
                print("started")
            """
            # Not at the start of this process, where the installed one is found.
            code = "import os; os.environ['WINDLASS_PYTHON'] = 'on'\n"
            printed, told = self.lines(code + "\n".join(line.strip() for line in script.splitlines()))
            self.assertEqual(printed, ["started"])
            self.assertIn("invalid ELF header" if broken else "is not installed", told)

    def test_entry_point(self):
        """Python 3.15 finds the function by the name in the file, which has the name of the older file."""
        folder = pathlib.Path(windlass_autoload.__file__).parent
        module, _, function = (folder / "windlass_autoload.start").read_text().strip().partition(":")
        self.assertIs(getattr(importlib.import_module(module), function), windlass_autoload.start)
        self.assertTrue((folder / "windlass_autoload.pth").read_text().startswith("import "))

    def test_time(self):
        """Opening takes some hundred microseconds. The limit is for loaded machines."""
        script = """
            import ctypes, time, windlass_autoload, os
            os.environ["WINDLASS_PYTHON"] = "on"
            began = time.perf_counter()
            windlass_autoload.start()
            print(time.perf_counter() - began)
        """
        took = [float(self.lines(script)[0][0]) for _ in range(9)]
        print(f"autoload: opening takes {1e3 * min(took):.2f} ms, median {1e3 * statistics.median(took):.2f}")
        self.assertLess(min(took), 0.02)
