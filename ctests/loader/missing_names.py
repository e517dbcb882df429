"""Holds: a name that the real library lacks answers ncclInvalidUsage every time and is logged once; one that returns
a structure answers an empty one."""

from scene import BUILD, PRELOAD, TOYS, check, done, log_lines, run

result = run(BUILD / "ask", "init", "suspend", "suspend", "suspend", "version", LD_PRELOAD=PRELOAD,
             WINDLASS_NCCL=TOYS / "b")
check(result.stdout.splitlines()[1:4] == ["suspend 5"] * 3, "ncclCommSuspend answers ncclInvalidUsage", result)
lines = log_lines(result)
check(len(lines) == 1 and "ncclCommSuspend" in lines[0], "one line names it", result)
check("version 0 22802" in result.stdout, "other names are as before", result)
team = run(BUILD / "ask", "init", "world", "world", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOYS / "b")
check(team.stdout.splitlines()[1:] == ["world 0"] * 2, "ncclTeamWorld gives no ranks", team)
check(len(log_lines(team)) == 1, "and is logged once", team)
done()
