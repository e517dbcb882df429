"""Holds that a process whose file size limit is below that of the shared counters goes on, prints nothing and counts in
its own memory. (Growing the file would end it with SIGXFSZ.)"""

from scene import BUILD, PRELOAD, TOYS, check, check_quiet, done, run

result = run("bash", "-c", 'ulimit -f 8; exec "$0" init bcast', BUILD / "ask", LD_PRELOAD=PRELOAD,
             WINDLASS_NCCL=TOYS / "a")
check_quiet(result, "files of at most 8 KiB")
check(result.stdout == "init 0\nbcast 0\n", "calls are answered", result)
done()
