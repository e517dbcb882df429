"""Holds that a process runs with jemalloc preloaded, before or after Windlass. (Opened with RTLD_DEEPBIND, the real
library would end it with "free(): invalid pointer".)"""

import glob

from scene import BUILD, PRELOAD, SIM, TOYS, WHEELS, check, check_quiet, done, run, skip

found = sorted(glob.glob("/usr/lib/*/libjemalloc.so.2") + glob.glob("/usr/lib*/libjemalloc.so.2"))
if not found:
    skip("libjemalloc.so.2 is not installed (Debian: libjemalloc2)")
real = [TOYS / "a" / "libnccl.so.2"] + ([SIM / "libnccl.so.2"] if SIM else [])
real += sorted(WHEELS.glob("*/nvidia/nccl/lib/libnccl.so.2")) if WHEELS else []
for library in real:
    for preload in (f"{found[0]}:{PRELOAD}", f"{PRELOAD}:{found[0]}"):
        folders = SIM if SIM and library.parent == SIM else ""
        result = run(BUILD / "ask", "version", "string:0", "string:5", LD_PRELOAD=preload, WINDLASS_NCCL=library,
                     LD_LIBRARY_PATH=folders)
        check_quiet(result, f"{library} with {preload}")
        check("version 0 2" in result.stdout and "string no error" in result.stdout, "the real library answers", result)
done()
