"""Holds that the real library is found where the program would have found it, that the first of several is taken and
mapped once, and that Windlass never takes itself or a copy of itself."""

import os

from scene import BUILD, PRELOAD, TOYS, check, copy, done, log_lines, paths, run, scratch

FIRST, SECOND = 22801, 22802  # what the two toys answer
A, B = TOYS / "a", TOYS / "b"


def found(result, version, sentence):
    check(f"version 0 {version}" in result.stdout and not log_lines(result), sentence, result)


def mapped(result, folder):
    return [line for line in result.stdout.splitlines()
            if line.startswith("mapped") and line.split()[1].startswith(os.path.realpath(folder) + "/")]


found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=A / "libnccl.so.2"), FIRST,
      "WINDLASS_NCCL, a file")
found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=A), FIRST, "WINDLASS_NCCL, a folder")
found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=B, LD_LIBRARY_PATH=A), SECOND,
      "WINDLASS_NCCL before LD_LIBRARY_PATH")
found(run(BUILD / "ask_rpath", "version", LD_PRELOAD=PRELOAD), FIRST, "the program's RPATH")
found(run(BUILD / "ask_runpath", "version", LD_PRELOAD=PRELOAD), FIRST, "the program's RUNPATH")
found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=A), FIRST, "LD_LIBRARY_PATH")
found(run(BUILD / "ask", f"dlopen:{A}/libnccl.so.2", "version", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=B), SECOND,
      "what the program links, though it opens another later, by absolute path")

two = run(BUILD / "ask", "version", "mapped", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=paths(A, B))
found(two, FIRST, "of two candidates the first")
check(mapped(two, A) and not mapped(two, B), "and the second is not mapped", two)

# Programs that open NCCL themselves: by its name, which a preloaded Windlass answers, or by a path from a setting.
OPEN = """
import ctypes, sys
version = ctypes.c_int()
libraries = [ctypes.CDLL(name) for name in sys.argv[1:]]
print("version", libraries[-1].ncclGetVersion(ctypes.byref(version)), version.value)
"""
by_name = run("python3", "-c", OPEN, "libnccl.so.2", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=A, WINDLASS_NCCL=B)
found(by_name, SECOND, "dlopen by name is answered by a preloaded Windlass")
found(run("python3", "-c", OPEN, A / "libnccl.so.2", "libnccl.so.2", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=B), FIRST,
      "a library that is mapped already, by absolute path")
found(run("python3", "-c", OPEN, PRELOAD, LD_LIBRARY_PATH=A), FIRST,
      "dlopen of Windlass by path, the real one behind it")
found(run("python3", "-c", OPEN, PRELOAD, WINDLASS_NCCL=A), FIRST, "dlopen of Windlass by path, the real one named")

with scratch() as folder:
    copied = copy(PRELOAD, folder / "copy")
    named = run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=copied)
    refused = "version 2 " in named.stdout and len(log_lines(named)) == 1
    check(refused, "a copy of Windlass is refused, with one line", named)
    itself = run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=PRELOAD)
    check("version 2 " in itself.stdout and len(log_lines(itself)) == 1, "Windlass itself is refused", itself)
    found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=paths(folder / "copy", A)), FIRST,
          "a copy of Windlass is passed over")
    found(run(BUILD / "ask", "version", LD_LIBRARY_PATH=paths(PRELOAD.parent, A)), FIRST,
          "Windlass by LD_LIBRARY_PATH, not preloaded, the real one behind it")
    link = folder / "link"
    link.mkdir()
    (link / "libnccl.so.2").symlink_to(os.path.realpath(PRELOAD))
    found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=paths(link, A)), FIRST,
          "a link to Windlass is passed over")
    (folder / "broken").mkdir()
    (folder / "broken" / "libnccl.so.2").write_text("no library\n")
    found(run(BUILD / "ask", "version", LD_PRELOAD=PRELOAD, LD_LIBRARY_PATH=paths(folder / "broken", A)), FIRST,
          "a file that is no library is passed over")
done()
