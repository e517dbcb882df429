"""Holds that a C++ program prints the same with and without Windlass when it replaces `new` and `delete`, catches
exceptions of NCCL and cancels a thread blocked in NCCL."""

from scene import BUILD, PRELOAD, TOYS, check, check_quiet, done, run

TOY = TOYS / "cpp" / "libnccl.so.2"
EXPECTED = """version 22804
id threw no memory for an id
rank threw no thread for a rank
call threw no memory for a call
group threw no thread for a group
thread cancelled
"""

for name, variables in [("plain", {"LD_LIBRARY_PATH": TOY.parent}),
                        ("through Windlass", {"LD_PRELOAD": PRELOAD, "WINDLASS_NCCL": TOY})]:
    result = run(BUILD / "own_new", **variables)
    check_quiet(result, name)
    check(result.stdout == EXPECTED, f"{name}: the same outcome", result)
done()
