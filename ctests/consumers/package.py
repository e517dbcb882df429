"""Holds that after cmake/install.cmake a project with find_package(Windlass) compiles, links and runs, and a newer version
is not found. pkg-config does the same for a single file, and the installed tree may be moved."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "loader"))
from scene import PRELOAD, ROOT, TOYS, check, done, run, scratch  # noqa: E402

HEADERS = os.environ["CTESTS_INCLUDE_DIR"]
CUDA_STUBS = os.environ["CTESTS_CUDA_STUBS"]
CONSUMER = ROOT / "ctests" / "consumers" / "package"


def install(prefix):
    return run("cmake", f"-DPREFIX={prefix}", f"-DLIBRARY={PRELOAD}", f"-DINCLUDE_DIR={HEADERS}", "-P",
               ROOT / "cmake" / "install.cmake")


def configure(folder, prefix, *more):
    return run("cmake", "-S", CONSUMER, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", *more)


with scratch() as folder:
    installed = install(folder / "first")
    check(installed.returncode == 0, "install.cmake installs", installed)
    again = install(folder / "first")
    check(again.returncode == 0, "and installs again over itself", again)
    os.rename(folder / "first", folder / "moved")
    configured = configure(folder / "build", folder / "moved", f"-DCMAKE_C_FLAGS=-isystem {CUDA_STUBS}")
    check(configured.returncode == 0, "find_package(Windlass 0.3) finds it", configured)
    built = run("cmake", "--build", folder / "build")
    check(built.returncode == 0, "the consumer builds", built)
    result = run(folder / "build" / "consumer", WINDLASS_NCCL=TOYS / "a")
    check(result.stdout == "0 22801\n" and result.stderr == "", "and reaches the real library through Windlass", result)
    linked = run("cc", CONSUMER / "main.c", "-o", folder / "linked", "-I", folder / "moved" / "include" / "windlass",
                 "-L", folder / "moved" / "lib" / "windlass", "-lnccl")
    check(linked.returncode == 0, "so does a plain -lnccl", linked)
    flags = run("pkg-config", "--cflags", "--libs", "windlass", PKG_CONFIG_PATH=folder / "moved" / "lib" / "pkgconfig")
    by_flags = run("cc", CONSUMER / "main.c", "-o", folder / "by_flags", "-isystem", CUDA_STUBS, *flags.stdout.split())
    check(flags.returncode == 0 and by_flags.returncode == 0, "so do pkg-config's flags", by_flags)
    result = run(folder / "by_flags", WINDLASS_NCCL=TOYS / "a")
    check(result.stdout == "0 22801\n", "and what they build runs without a path", result)
    (folder / "moved" / "lib" / "windlass" / "libnccl.so.2").unlink()
    broken = configure(folder / "broken", folder / "moved")
    said = broken.returncode != 0 and "install Windlass again" in broken.stderr
    check(said, "a broken tree is not found, and says why", broken)
done()
