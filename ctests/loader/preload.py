"""Holds that Windlass prints nothing and changes nothing when preloaded into programs that do not use NCCL, and that the
real NCCL gets what another preload answers in libc's place."""

import shutil

from scene import BUILD, PRELOAD, TOYS, check, check_quiet, done, run, scratch

with scratch() as folder:
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    commands = [["python3", "-c", "pass"], ["bash", "-c", ":"], ["bash", "-c", "(:) | cat; $(:)"],
                ["gcc", "--version"], ["gcc", "-o", folder / "empty", source], ["make", "--version"]]
    for command in commands:
        if shutil.which(command[0]):
            check_quiet(run(*command, LD_PRELOAD=PRELOAD), " ".join(str(word) for word in command))
    check((folder / "empty").exists(), "the compiler made its program")
    # A program may have given up its environment by its end.
    source.write_text("""#include <sys/mman.h>
extern char** environ;
int main(void) {
  environ = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return munmap(environ, 4096);
}
""")
    run("gcc", "-o", folder / "bare", source)
    check_quiet(run(folder / "bare", LD_PRELOAD=PRELOAD, WINDLASS_RUN="1.1"), "a program without its environment")
    # Loading alone opens nothing, starts no thread and leaves no descriptor.
    script = "import os; print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
    check(run("python3", "-c", script, LD_PRELOAD=PRELOAD).stdout == run("python3", "-c", script).stdout,
          "as many threads and descriptors as without")
    # A report is asked for, but there was no call, so nothing is printed.
    check_quiet(run("python3", "-c", "pass", LD_PRELOAD=PRELOAD, WINDLASS_LOG="error"), "with the log on")
shim = TOYS / "libshim.so"
for preload in (f"{shim}:{PRELOAD}", f"{PRELOAD}:{shim}"):
    result = run(BUILD / "ask", "string:-1", LD_PRELOAD=preload, WINDLASS_NCCL=TOYS / "a")
    check(result.stdout == "string the shim's host\n", "the real NCCL asks the shim", result)
done()
