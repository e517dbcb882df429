"""A rank: joins communicators a and b, makes the calls that its arguments name, says so, and stays.

Calls between `[` and `]` become a graph. `replay` runs the last graph, `replays.SECONDS` runs it for ever, with a pause of so many seconds.
`hold` holds the next copy from a device, as a copy of the program's own does that waits for a kernel. A line of input has NCCL run a call of b."""

import ctypes, os, sys, time
from ctypes import byref, c_int, c_size_t, c_void_p

rank, ranks, calls = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if calls[:1] == ["lazy"]:  # NCCL makes b late, by an id that rank 0's process makes
    os.environ["WINDLASS_LAZY"] = "all"
    calls.pop(0)
nccl, cuda = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL("libcuda.so.1")
class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

def check(code):
    assert code == 0, code

context, buffer, stream, graph, replayed = (c_void_p() for _ in range(5))
held = c_int()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(byref(context), 0 if "ONE_GPU_ORDINAL" in os.environ else rank))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuStreamCreate(byref(stream), 1))
captures = False

def replay():
    check(cuda.cuGraphLaunch(replayed, stream))

comms = {}
for name in "ab":
    id = Id()
    if rank == 0:
        check(nccl.ncclGetUniqueId(byref(id)))
        with open(name + ".part", "wb") as file:
            file.write(bytes(id))
        os.rename(name + ".part", name)
    while not os.path.exists(name):
        time.sleep(0.01)
    ctypes.memmove(byref(id), open(name, "rb").read(), 128)
    comms[name] = c_void_p()
    nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, Id, c_int]
    check(nccl.ncclCommInitRank(byref(comms[name]), ranks, id, rank))
check(nccl.ncclMemAlloc(byref(buffer), c_size_t(32 << 20)))
for call in calls:
    match call.split(".", 1):
        case ["["]:
            captures = True
            check(cuda.cuStreamBeginCapture_v2(stream, 1))
            continue
        case ["]"]:
            captures = False
            check(cuda.cuStreamEndCapture(stream, byref(graph)))
            check(cuda.cuGraphInstantiateWithFlags(byref(replayed), graph, ctypes.c_uint64(0)))
            continue
        case ["replay"]:
            replay()
            continue
        case ["hold"]:
            check(cuda.simHold(b"cuMemcpyDtoHAsync_v2", byref(held)))
            continue
        case ["replays", pause]:
            print("made", flush=True)
            while True:
                replay()
                check(cuda.cuStreamSynchronize(stream))
                time.sleep(float(pause))
    name, function, count, *other = call.split(".")
    comm, count, other = comms[name], c_size_t(int(count)), [c_int(int(word)) for word in other]
    end = other + [comm, stream if captures else None]
    match function:
        case "AllReduce":
            check(nccl.ncclAllReduce(buffer, buffer, count, 0, 0, *end))
        case "AllGather":
            check(nccl.ncclAllGather(buffer, c_void_p(buffer.value + (1 << 20)), count, 0, *end))
        case "Broadcast":
            check(nccl.ncclBroadcast(buffer, buffer, count, 0, *end))
        case "Send":
            check(nccl.ncclSend(buffer, count, 0, *end))
        case "Recv":
            check(nccl.ncclRecv(buffer, count, 0, *end))
print("made", flush=True)
for _ in sys.stdin:
    check(nccl.ncclBroadcast(buffer, buffer, c_size_t(32 << 20), 0, 0, comms["b"], None))
    print("called", flush=True)
os._exit(0)
