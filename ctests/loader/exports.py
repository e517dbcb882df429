"""Holds that Windlass exports exactly the names that some release of NCCL exports, and its own few. Its soname is
libnccl.so.2, and it needs neither CUDA nor NCCL."""

import re
import subprocess

from scene import PRELOAD, ROOT, check, done


def lines(command):
    return subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout.splitlines()


def names_in(path):
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}


lists = sorted((ROOT / "abi" / "exports").glob("*.txt"))
wanted = set().union(*map(names_in, lists))
exported = {line.split()[-1].split("@")[0] for line in lines(["nm", "-D", "--defined-only", PRELOAD])}
nccl = {name for name in exported if re.match("p?nccl", name)}
check(nccl >= wanted, f"every name of {len(lists)} releases ({len(wanted)}); missing: {sorted(wanted - nccl)}")
# By these NCCL opens Windlass as its profiler plugin.
plugin = {f"ncclProfiler_v{version}" for version in range(4, 8)}
check(nccl - wanted == plugin, f"no other name of NCCL's than a plugin's; differ: {sorted(nccl - wanted ^ plugin)}")
others = {name for name in exported - nccl if not name.startswith("windlass")}
check(not others, f"besides them only names that begin with windlass; more: {sorted(others)}")
dynamic = " ".join(lines(["readelf", "-d", PRELOAD]))
check("Library soname: [libnccl.so.2]" in dynamic, "the soname")
needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.*?)\]", dynamic)
check(not [name for name in needed if re.search("cuda|nccl|nvidia", name)], f"it needs {', '.join(needed)}")
done()
