"""Holds that CuPy's NCCL calls give the same over Windlass: all GPUs from one process, groups, send/recv.

Prints one line a part with a digest of all results.
"""

import hashlib

import cupy
from cupy.cuda import nccl


def main():
    devices = list(range(min(cupy.cuda.runtime.getDeviceCount(), 4)))
    ranks = len(devices)
    communicators = nccl.NcclCommunicator.initAll(devices)
    streams, inputs, outputs = [], [], []
    for device in devices:
        with cupy.cuda.Device(device):
            streams.append(cupy.cuda.Stream(non_blocking=True))
            inputs.append(cupy.arange(1 << 16, dtype=cupy.float32) * (device + 1))
            outputs.append(cupy.zeros(ranks << 16, dtype=cupy.float32))
            cupy.cuda.Device(device).synchronize()

    def everywhere(name, call):
        nccl.groupStart()
        for device in devices:
            with cupy.cuda.Device(device):
                call(communicators[device], device, streams[device].ptr)
        nccl.groupEnd()
        total = hashlib.sha256()
        for device in devices:
            with cupy.cuda.Device(device):
                streams[device].synchronize()
                total.update(outputs[device].get().tobytes())
        print(name, total.hexdigest()[:16], flush=True)

    count, single, plus = 1 << 16, nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    source = lambda device: inputs[device].data.ptr
    target = lambda device: outputs[device].data.ptr
    everywhere("allReduce", lambda c, d, s: c.allReduce(source(d), target(d), count, single, plus, s))
    expected = inputs[0].get() * sum(device + 1 for device in devices)
    assert (outputs[-1].get()[:count] == expected).all()
    everywhere("allGather", lambda c, d, s: c.allGather(source(d), target(d), count, single, s))
    everywhere("reduceScatter", lambda c, d, s: c.reduceScatter(source(d), target(d), count // ranks, single, plus, s))
    everywhere("broadcast", lambda c, d, s: c.broadcast(source(d), target(d), count, single, 1, s))
    everywhere("reduce", lambda c, d, s: c.reduce(source(d), target(d), count, single, plus, 0, s))

    def ring(communicator, device, stream):
        communicator.send(source(device), count, single, (device + 1) % ranks, stream)
        communicator.recv(target(device), count, single, (device - 1) % ranks, stream)

    everywhere("ring", ring)
    assert (outputs[0].get()[:count] == inputs[-1].get()).all()
    for communicator in communicators:
        communicator.destroy()


if __name__ == "__main__":
    main()
