"""Holds that a real library which calls its own public names while it is being loaded can be opened. No other thread calls into it before it is loaded. A constructor that calls NCCL does not wait for a thread
that waits for the loader."""

from scene import BUILD, PRELOAD, TOYS, check, check_quiet, done, run

TOY = TOYS / "early" / "libnccl.so.2"

for word, expected in [("version", "version 0 22803"), ("race", "race 64 of 64 answered 0")]:
    result = run(BUILD / "ask", word, "version", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOY)
    check_quiet(result, word)
    check(expected in result.stdout and "version 0 22803" in result.stdout, expected, result)

result = run(BUILD / "ask", f"beside:{TOYS}/libcalling.so", LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOYS / "a")
check_quiet(result, "a library whose constructor calls NCCL beside the first call")
check(result.stdout == "beside done 22801\n", "both are answered", result)
done()
