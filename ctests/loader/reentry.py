"""Holds that calls of the real library to its own public names run in the real library and are not counted as the
program's: through the PLT, from its own thread and by a tail call."""

from scene import BUILD, PRELOAD, TOYS, check, done, functions_of, run, scratch

TOY = TOYS / "a" / "libnccl.so.2"
COUNTED = {"ncclBcast": 1, "ncclBroadcast": 1, "ncclReduce": 1, "ncclAllGather": 1}

with scratch() as folder:
    result = run(BUILD / "ask", "init", "bcast", "broadcast", "reduce", "allgather", f"toy:{TOY}",
                 LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOY, WINDLASS_REPORT=f"json:{folder}/report-%p.json")
    check(result.returncode == 0 and result.stderr == "", "the program ends well", result)
    check("toy 4" in result.stdout, "the innermost function ran once a call", result)
    functions = {key: value for key, value in functions_of(folder).items() if key in COUNTED}
    check(functions == COUNTED, f"each call is counted once: {functions}", result)
done()
