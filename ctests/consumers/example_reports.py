"""Holds that the report of each compiled example on the simulator has the line that the example's head names.

    example_reports.py SOURCE=PROGRAM...
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "loader"))
from scene import ROOT, SIM, WINDLASS, check, done, paths, run  # noqa: E402

GPUS = 2  # as the heads have it


def announced(source):
    """The line of the report that the head of an example names."""
    return re.search(r"on the simulator(?:, 2 GPUs)?: (.*)", (ROOT / "examples" / source).read_text())[1]


def words(text):
    return " ".join(text.split())


for pair in sys.argv[1:]:
    source, program = pair.split("=", 1)
    line = announced(source)
    result = run(program, LD_LIBRARY_PATH=paths(WINDLASS, SIM), WINDLASS_NCCL=SIM / "libnccl.so.2", WINDLASS_SIM_DEVICES=GPUS,
                 WINDLASS_REPORT="text")
    check(result.returncode == 0 and " 0 wrong\n" in result.stdout, f"{source} runs on the simulator", result)
    lines = [words(said) for said in result.stderr.splitlines()]
    check(any(said.startswith(line) for said in lines), f"its report has: {line}", result)
done()
