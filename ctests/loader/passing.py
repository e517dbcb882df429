"""Holds that every argument and every result passes unchanged, in registers and on the stack, by value and by pointer,
also in the very first call, which opens the real library, and from many threads at once."""

from scene import BUILD, PRELOAD, TOYS, check, done, run

ANSWERS = {"rank": "rank 0", "put": "put 0", "team": "team 11 22 33", "race": "race 64 of 64 answered 0"}

for word, answer in ANSWERS.items():
    plain = run(BUILD / "ask", word, word, LD_LIBRARY_PATH=TOYS / "a")
    check(plain.stdout == f"{answer}\n" * 2, f"{word}, plainly", plain)
    ours = run(BUILD / "ask", word, word, LD_PRELOAD=PRELOAD, WINDLASS_NCCL=TOYS / "a")
    check(ours.stdout == f"{answer}\n" * 2, f"{word} as the first call and after it, through Windlass", ours)
    check(ours.stderr == "" and ours.returncode == 0, f"{word}: nothing is logged", ours)
done()
