"""JAX, one process and a thread a GPU: every GPU ends with the sum of all inputs.

    NCCL_NVLS_ENABLE=0 WINDLASS_REPORT=text windlass run -- python3 jax_psum.py

Nothing here is Windlass's own: the script is written for JAX (0.7 and later), which calls NCCL. It does not run on the simulator: JAX
computes on GPUs.

Did it work? It prints "0 wrong". The report at the end has a communicator for each GPU. Path native says that Windlass's kernel ran its
sums, path forward that NCCL did:

    ncclAllReduce                  native

With more rounds (--rounds 1000000), "windlass stats" in another terminal shows a line for the process while it runs.
"""

import argparse
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of a GPU's memory at once

try:
    import jax
    import numpy
except ImportError:
    jax = None  # read_options says so


def main():
    options, devices = read_options()
    ranks = len(devices)
    mesh = jax.sharding.Mesh(numpy.array(devices), ("gpu",))
    rows = jax.sharding.PartitionSpec("gpu")
    place = jax.sharding.NamedSharding(mesh, rows)

    # Row r lies on GPU r, and holds r + column % 7. Smaller rows XLA may sum without NCCL.
    pattern = numpy.arange(options.count) % 7
    values = numpy.stack([rank + pattern for rank in range(ranks)]).astype(numpy.float32)
    inputs = jax.device_put(values, place)
    total = jax.jit(jax.shard_map(lambda row: jax.lax.psum(row, "gpu"), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    for _ in range(options.rounds):
        summed = total(inputs)
    summed.block_until_ready()

    expected = ranks * (ranks - 1) // 2 + ranks * pattern
    wrong = int((numpy.asarray(summed) != expected).sum())
    print(f"JAX {jax.__version__}, {options.rounds} sums over {ranks} GPUs: {wrong} wrong")
    return wrong != 0


def read_options():
    """What the command line says, and the GPUs; ends the program where the script cannot run."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--ranks", type=int, help="how many GPUs [default: all]")
    arguments.add_argument("--rounds", type=int, default=10, help="how many sums, at least 1 [default: 10]")
    arguments.add_argument("--count", type=int, default=1 << 20, help="numbers of a GPU [default: 1048576]")
    options = arguments.parse_args()
    if options.rounds < 1:
        arguments.error("--rounds: at least 1")
    if jax is None:
        arguments.exit(1, 'JAX is missing: pip install "jax[cuda13]" (or cuda12, as the driver is)\n')
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        arguments.exit(1, "JAX sees no GPU\n")
    if options.ranks and options.ranks > len(devices):
        arguments.exit(1, f"--ranks {options.ranks}: JAX sees {len(devices)} GPUs\n")
    return options, devices[: options.ranks]


if __name__ == "__main__":
    raise SystemExit(main())
