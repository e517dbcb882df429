"""Holds: `enable` puts Windlass in front of NCCL, once, or says why it does not."""

import os
import subprocess
import sys

from scene import Scene

CALLS = "import calls; calls.all_reduce(); print(sorted(windlass.stats()['functions']))"


class Enable(Scene):
    def refused(self, result, *words):
        """A script that printed why it was refused."""
        told = self.passed(result)
        for word in ["refused: ", *words]:
            self.assertIn(word, told)

    def test_restart(self):
        """The process starts again with its number, its arguments and Python's, and then calls are Windlass's."""
        script = f"""
            import os, sys, windlass
            print(os.getpid(), sys.argv[1:], os.environ.get("KEPT"))
            print(windlass.enable(), windlass.enable())
            {CALLS}
        """
        lines = self.passed(self.run_script(script, "a b", "", KEPT="yes")).splitlines()
        self.assertEqual(lines[0], lines[1])
        self.assertTrue(lines[0].endswith(" ['a b', ''] yes"), lines)
        self.assertEqual(lines[2], "True True")
        self.assertIn("'ncclAllReduce'", lines[3])

    def test_restart_of_options(self):
        """Options of Python, `-c` and `-m` among them, are kept."""
        code = f"import sys, windlass; windlass.enable(); print(sys.flags.optimize); {CALLS}"
        lines = self.passed(self.run_program(sys.executable, "-O", "-c", code)).splitlines()
        self.assertEqual(lines[0], "1")
        (self.folder / "as_module.py").write_text(f"import windlass; windlass.enable(); {CALLS}\n")
        result = self.run_program(sys.executable, "-m", "as_module", PYTHONPATH=f"{self.folder}:{os.path.dirname(__file__)}")
        self.assertIn("'ncclAllReduce'", self.passed(result))

    def test_named_nccl(self):
        """The real NCCL may be named."""
        script = f"""
            import windlass
            windlass.enable(nccl={str(self.nccl)!r})
            import os; print(os.environ["WINDLASS_NCCL"])
        """
        told = self.passed(self.run_script(script, LD_LIBRARY_PATH=""))
        self.assertEqual(told.strip(), str(self.nccl.resolve()))

    def test_loaded_nccl(self):
        """Once NCCL is loaded it is too late, for children, too: the text names the library."""
        for arguments in ["", "restart=False"]:
            script = f"""
                import ctypes, os, windlass
                ctypes.CDLL("libnccl.so.2")
                try:
                    windlass.enable({arguments})
                except windlass.Error as error:
                    print("refused:", error, os.environ.get("LD_PRELOAD"))
            """
            self.refused(self.run_script(script), "NCCL is loaded already", str(self.nccl), "windlass run", " None")

    def test_tracer(self):
        """A tracer of NCCL's calls that was preloaded stays in front, after the restart, too, and is named."""
        tracer = self.folder / "libtracer.so"
        source = self.folder / "tracer.c"
        source.write_text("int ncclCommInitRank(void) { return 1; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tracer, source], check=True)
        script = """
            import os, windlass
            windlass.enable()
            print(os.environ["LD_PRELOAD"] == f"{os.environ['TRACER']}:{windlass.library()}")
        """
        result = self.run_script(script, LD_PRELOAD=str(tracer), TRACER=str(tracer))
        self.assertEqual((result.returncode, result.stdout), (0, "True\n"), result.stderr)
        self.assertIn(f"in front of Windlass, to see NCCL's calls: {tracer}", result.stderr)

    def test_children(self):
        """Without a restart the process stays as it is, and those that it starts have Windlass."""
        script = f"""
            import multiprocessing, subprocess, sys, windlass
            def rank(queue):
                import calls
                calls.all_reduce()
                queue.put((windlass.enable(), windlass.stats()["functions"]["ncclAllReduce"]))
            if __name__ == "__main__":
                print(windlass.enable(restart=False), windlass.enable(restart=False))
                code = "import sys, windlass; print(windlass.enable()); {CALLS}"
                print(subprocess.check_output([sys.executable, "-c", code], universal_newlines=True), end="")
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                child = context.Process(target=rank, args=(queue,))
                child.start()
                print(queue.get(timeout=60))
                child.join()
        """
        lines = self.passed(self.run_script(script)).splitlines()
        self.assertEqual((lines[0], lines[1], lines[3]), ("False False", "True", "(True, 1)"))
        self.assertIn("'ncclAllReduce'", lines[2])

    def test_child_by_multiprocessing(self):
        """A process that gets its work from another by a pipe cannot start again."""
        script = """
            import multiprocessing, windlass
            def rank(method):
                try:
                    windlass.enable()
                except windlass.Error as error:
                    print("refused:", error)
            if __name__ == "__main__":
                for method in ["fork", "spawn"]:
                    child = multiprocessing.get_context(method).Process(target=rank, args=(method,))
                    child.start()
                    child.join()
        """
        result = self.run_script(script)
        self.refused(result, "restart=False")
        self.assertEqual(result.stdout.count("refused: "), 2)

    def test_no_second_run(self):
        """What was read from standard input, or typed, is not there again."""
        code = "import windlass\ntry: windlass.enable()\nexcept windlass.Error as error: print('refused:', error)\n\n"
        self.refused(self.run_program(sys.executable, text=code), "standard input")
        self.refused(self.run_program(sys.executable, "-", "argument", text=code), "standard input")
        typed = self.run_program(sys.executable, "-i", "-q", text=code)
        self.assertIn("refused: an interactive session", typed.stdout)

    def test_no_nccl(self):
        """Without a real NCCL nothing is changed, and the text has the search."""
        script = """
            import os, windlass
            try:
                windlass.enable()
            except windlass.Error as error:
                print("refused:", error, os.environ.get("LD_PRELOAD"))
        """
        self.refused(self.run_script(script, LD_LIBRARY_PATH=""), "no real NCCL", "--nccl", " None")

    def test_dropped_preload(self):
        """A program that drops the preload is not started for ever."""
        wrapper = self.folder / "wrapper"
        wrapper.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        script = f"""
            import sys, windlass
            sys.executable = {str(wrapper)!r}
            try:
                windlass.enable(nccl={str(self.nccl)!r})
            except windlass.Error as error:
                print("refused:", error)
        """
        self.refused(self.run_script(script), "has started again", "libwindlass.so")
