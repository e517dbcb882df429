"""Packs wheels with Python's standard library alone: a wheel is a zip with a list of its files.

Usage: wheel.py FOLDER OUT   FOLDER has what scripts/shipped built; prints the paths of the wheels, which are in OUT: the package, and
                             windlass-autoload.
"""

import base64
import hashlib
import pathlib
import re
import stat
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "windlass"
AUTOLOAD = ROOT / "python" / "autoload"
# The second name is what pip before 20.3 calls the first, as Ubuntu 20.04 has it.
PLATFORMS = ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]
ENTRY_POINTS = b"""\
[console_scripts]
windlass = windlass.__main__:main

[sglang.srt.plugins]
windlass = windlass._plugins:sglang

[vllm.general_plugins]
windlass = windlass._plugins:vllm
"""
LIBRARIES = ["libwindlass.so", "libsim_cuda.so", "libsim_kernels.so", "libsim_nccl.so"]


def version():
    """The workspace's."""
    return re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)


def metadata(name, version, summary, more, readme):
    """What pip shows and PyPI would."""
    head = f"""\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: {summary}
License: Apache-2.0 OR MIT
Requires-Python: >=3.8
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
{more}
Description-Content-Type: text/markdown
"""
    return head + "\n" + readme.read_text()


def tags(platforms, is_pure):
    """The file that says where the wheel may be installed."""
    lines = ["Wheel-Version: 1.0", "Generator: windlass", f"Root-Is-Purelib: {str(is_pure).lower()}"]
    return "\n".join(lines + [f"Tag: py3-none-{platform}" for platform in platforms]) + "\n"


def contents(built, version):
    """Every file: its name in the wheel, its bytes, whether it is a program."""
    for source in sorted(PACKAGE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            yield f"windlass/{source.relative_to(PACKAGE)}", source.read_bytes(), False
    # As an installation is laid out, so that the command finds its files.
    yield "windlass/bin/windlass", (built / "windlass").read_bytes(), True
    for name in LIBRARIES:
        yield f"windlass/lib/windlass/{name}", (built / name).read_bytes(), True
    for name in ["nccl.h", "windlass.h"]:
        yield f"windlass/include/windlass/{name}", (ROOT / "include" / name).read_bytes(), False
    package = "windlass/lib/cmake/Windlass"
    for name in ["WindlassConfig.cmake", "WindlassLink.cmake"]:
        yield f"{package}/{name}", (ROOT / "cmake" / name).read_bytes(), False
    config_version = (ROOT / "cmake" / "WindlassConfigVersion.cmake.in").read_text().replace("@VERSION@", version)
    yield f"{package}/WindlassConfigVersion.cmake", config_version.encode(), False
    information = f"windlass-{version}.dist-info"
    for source in [*sorted(ROOT.glob("LICENSE-*")), built / "LICENSES-THIRD-PARTY"]:
        yield f"{information}/{source.name}", source.read_bytes(), False
    summary = "A drop-in for libnccl.so.2: NCCL programs run over it unchanged"
    about = metadata("windlass", version, summary, "Classifier: Typing :: Typed", ROOT / "python" / "README.md")
    yield f"{information}/METADATA", about.encode(), False
    yield f"{information}/WHEEL", tags(PLATFORMS, is_pure=False).encode(), False
    yield f"{information}/entry_points.txt", ENTRY_POINTS, False


def contents_of_autoload(version):
    """The same of windlass-autoload, whose files lie beside the package's folder: Python looks for them there."""
    for source in sorted(AUTOLOAD.glob("windlass_autoload.*")):
        yield source.name, source.read_bytes(), False
    information = f"windlass_autoload-{version}.dist-info"
    for source in sorted(ROOT.glob("LICENSE-*")):
        yield f"{information}/{source.name}", source.read_bytes(), False
    summary = "Opens Windlass in Python programs that lose LD_PRELOAD, where WINDLASS_PYTHON=on"
    about = metadata("windlass-autoload", version, summary, "Requires-Dist: windlass", AUTOLOAD / "README.md")
    yield f"{information}/METADATA", about.encode(), False
    yield f"{information}/WHEEL", tags(["any"], is_pure=True).encode(), False


def record_line(name, data):
    """A line of the list of files."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def add(wheel, name, data, is_program):
    """Writes a file; the same bytes make the same wheel, whenever it is made."""
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.external_attr = (stat.S_IFREG | (0o755 if is_program else 0o644)) << 16
    wheel.writestr(entry, data, zipfile.ZIP_DEFLATED, compresslevel=9)


def main(built, out):
    """Packs."""
    number = version()
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pack(folder, f"windlass-{number}", PLATFORMS, contents(pathlib.Path(built), number))
    pack(folder, f"windlass_autoload-{number}", ["any"], contents_of_autoload(number))


def pack(folder, name, platforms, files):
    """Packs one, and prints its path."""
    path = folder / f"{name}-py3-none-{'.'.join(platforms)}.whl"
    partial = path.with_suffix(".part")
    record = f"{name}.dist-info/RECORD"
    lines = ""
    with zipfile.ZipFile(partial, "w") as wheel:
        for name, data, is_program in files:
            add(wheel, name, data, is_program)
            lines += record_line(name, data)
        add(wheel, record, (lines + f"{record},,\n").encode(), False)
    partial.replace(path)
    print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
