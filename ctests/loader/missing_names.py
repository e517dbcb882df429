"""Holds that a function which the real library lacks returns ncclInvalidUsage every time and is logged once, as a
warning (by default nothing is printed). One that returns a structure returns an empty one. A suspend succeeds: programs that find the function suspend all communicators alike."""

from scene import BUILD, PRELOAD, TOYS, check, done, log_lines, run

result = run(BUILD / "ask", "init", "revoke", "revoke", "revoke", "version", LD_PRELOAD=PRELOAD,
             WINDLASS_LOG="warn", WINDLASS_NCCL=TOYS / "b")
check(result.stdout.splitlines()[1:4] == ["revoke 5"] * 3, "ncclCommRevoke answers ncclInvalidUsage", result)
lines = log_lines(result)
check(len(lines) == 1 and "ncclCommRevoke" in lines[0], "one line names it", result)
check("version 0 22802" in result.stdout, "other names are as before", result)
team = run(BUILD / "ask", "init", "world", "world", LD_PRELOAD=PRELOAD, WINDLASS_LOG="warn",
           WINDLASS_NCCL=TOYS / "b")
check(team.stdout.splitlines()[1:] == ["world 0"] * 2, "ncclTeamWorld gives no ranks", team)
check(len(log_lines(team)) == 1, "and is logged once", team)
quiet = run(BUILD / "ask", "init", "revoke", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOYS / "b")
check(quiet.stdout.splitlines()[1:] == ["revoke 5"] and quiet.stderr == "", "nothing is printed unless asked", quiet)
suspended = run(BUILD / "ask", "init", "suspend", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOYS / "b")
check(suspended.stdout.splitlines()[1:] == ["suspend 0"], "a suspend that NCCL lacks keeps the memory, and succeeds", suspended)
done()
