#!/usr/bin/env python3
"""Fetches a wheel and compares the committed tables with its contents.

    fresh_tables.py CACHE_DIR VERSION
"""

import pathlib
import subprocess
import sys

ABI = pathlib.Path(__file__).resolve().parents[2] / "abi"
sys.path.insert(0, str(ABI))
import fetch  # noqa: E402

wheel = fetch.fetch(sys.argv[2], sys.argv[1])
sys.exit(subprocess.run([sys.executable, ABI / "extract.py", sys.argv[2], wheel, "--check"]).returncode)
