"""Holds that without a real NCCL every call returns ncclSystemError, one log line says what was searched, and no process
crashes."""

from scene import BUILD, PRELOAD, check, copy, done, log_lines, run, scratch

SYSTEM_ERROR = 2

with scratch() as folder:
    copy(PRELOAD, folder)
    result = run(BUILD / "ask", "version", "init", "bcast", "broadcast", "reduce", "allgather", "version", "suspend",
                 "string:2", LD_LIBRARY_PATH=folder)
    check(result.returncode == 0, "the program lives", result)
    answers = [line.split() for line in result.stdout.splitlines()]
    check(all(int(words[1]) == SYSTEM_ERROR for words in answers[:-1]), "every call answers ncclSystemError", result)
    check("system error" in result.stdout, "the error strings are there all the same", result)
    lines = log_lines(result)
    check(len(lines) == 1 and len(result.stderr.splitlines()) == 1, "exactly one line is logged", result)
    check(str(folder) in result.stderr, "it names a place that was searched", result)
    named = run(BUILD / "ask", "version", LD_LIBRARY_PATH=folder, WINDLASS_NCCL="/nowhere/libnccl.so.2")
    names = "/nowhere/libnccl.so.2" in named.stderr and len(log_lines(named)) == 1
    check(names, "it names what WINDLASS_NCCL said", named)
    check(named.stdout.split()[1] == str(SYSTEM_ERROR), "a wrong WINDLASS_NCCL is not replaced by another", named)
    closed = run("bash", "-c", 'exec "$0" version init suspend version 2>&-', BUILD / "ask", LD_LIBRARY_PATH=folder)
    lives = closed.returncode == 0 and len(closed.stdout.splitlines()) == 4
    check(lives, "a closed standard error harms nothing", closed)
    race = run(BUILD / "ask", "race", LD_LIBRARY_PATH=folder)
    check(race.stdout == "race 64 of 64 answered 2\n", "of many threads that call first at once each is answered", race)
    check(len(log_lines(race)) == 1, "and one line is logged", race)
done()
