"""Holds that JAX's collectives (one process, all GPUs, one thread a device) give the same over Windlass."""

import hashlib
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Mesh, PartitionSpec


def main():
    devices = jax.devices()[:4]
    mesh = Mesh(numpy.array(devices), ("x",))
    split, whole = PartitionSpec("x"), PartitionSpec()
    # Large enough that XLA leaves the sum to NCCL.
    data = jnp.arange(len(devices) << 20, dtype=jnp.float32).reshape(len(devices), 1 << 20) % 1024

    def everywhere(name, body, out):
        result = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=out, check_vma=False))(data)
        print(name, hashlib.sha256(numpy.asarray(result).tobytes()).hexdigest()[:16], flush=True)
        return result

    summed = everywhere("psum", lambda x: jax.lax.psum(x, "x"), whole)
    assert (numpy.asarray(summed)[0] == numpy.asarray(data).sum(axis=0)).all()
    everywhere("all_gather", lambda x: jax.lax.all_gather(x, "x", tiled=True), whole)
    everywhere("psum_scatter", lambda x: jax.lax.psum_scatter(x[0], "x", tiled=True), split)
    neighbours = [(i, (i + 1) % len(devices)) for i in range(len(devices))]
    everywhere("ppermute", lambda x: jax.lax.ppermute(x, "x", neighbours), split)
    everywhere("all_to_all", lambda x: jax.lax.all_to_all(x.reshape(len(devices), -1), "x", 0, 0), split)


if __name__ == "__main__":
    main()
