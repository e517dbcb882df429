#!/usr/bin/env python3
"""Fetches one NCCL release: downloads the wheel nvidia-nccl-cu12 with pip and unpacks its header and library.

    fetch.py VERSION DIR

Afterwards DIR/VERSION/nvidia/nccl holds include/ and lib/; a folder that is already there is kept. Prints the
folder DIR/VERSION.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

# Tags that NVIDIA gave its wheels over the years; naming them makes the answer the same on every machine.
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ["1", "2014", "_2_17", "_2_18", "_2_24", "_2_27", "_2_28"]]


def fetch(version, directory):
    """The folder of the unpacked wheel of `version` under `directory`."""
    target = pathlib.Path(directory) / version
    if (target / "nvidia" / "nccl" / "lib" / "libnccl.so.2").exists():
        return target
    with tempfile.TemporaryDirectory(prefix="windlass-wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary=:all:", "--dest", scratch, f"nvidia-nccl-cu12=={version}"]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        subprocess.run(command, check=True, stdout=sys.stderr)
        wheel, = pathlib.Path(scratch).glob("*.whl")
        unpack(wheel, target)
    return target


def unpack(wheel, target):
    # The library last: its presence says that the folder is complete.
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("nvidia/nccl/")]
        for name in sorted(members, key=lambda name: name.endswith("libnccl.so.2")):
            archive.extract(name, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    print(fetch(sys.argv[1], sys.argv[2]))
