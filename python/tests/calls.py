"""A program of one rank that speaks NCCL by ctypes: one all-reduce of eight floats."""

import ctypes


class UniqueId(ctypes.Structure):
    """NCCL's `ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_char * 128)]


def all_reduce():
    """Makes a communicator, runs one all-reduce, and ends the communicator."""
    cuda, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")

    def called(library, function, *arguments):
        result = getattr(library, function)(*arguments)
        assert result == 0, f"{function} ended with {result}"

    context, buffer, handle, unique = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p(), UniqueId()
    called(cuda, "cuInit", 0)
    called(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    called(cuda, "cuCtxSetCurrent", context)
    called(cuda, "cuMemAlloc_v2", ctypes.byref(buffer), ctypes.c_size_t(32))
    called(nccl, "ncclGetUniqueId", ctypes.byref(unique))
    called(nccl, "ncclCommInitRank", ctypes.byref(handle), 1, unique, 0)
    where, float32, add = ctypes.c_void_p(buffer.value), 7, 0
    called(nccl, "ncclAllReduce", where, where, ctypes.c_size_t(8), float32, add, handle, None)
    called(cuda, "cuCtxSynchronize")
    called(nccl, "ncclCommDestroy", handle)
