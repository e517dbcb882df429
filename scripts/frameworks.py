"""Tries the plugins of the Python package on the source of one release of vLLM or SGLang, without GPUs.

    frameworks.py vllm|sglang SOURCE

SOURCE is an unpacked wheel. What decides is the framework's own: its class, its method, its registry of hooks. What surrounds them and is not
installed here is an empty module. Windlass's library is a file that nobody opens: the framework would open it on GPUs only.
"""

import importlib
import importlib.abc
import importlib.machinery
import io
import logging
import os
import sys
import types
from pathlib import Path
from unittest import mock

from windlass import _plugins

INTERVALS = "4K-64K,8M-"
# Bytes, and whether they are in these intervals.
CASES = [(4095, False), (4096, True), (65536, True), (65537, False), (8388607, False), (8388608, True), (1 << 30, True)]
log = io.StringIO()


class Missing(types.ModuleType):
    """A module that is not installed, or that needs a GPU: whatever is asked of it is a mock."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else does: only the packages around the framework, never a module of the framework that is under test."""

    def __init__(self, own, keep):
        self.own, self.keep, self.made = own, keep, []

    def find_spec(self, name, path=None, target=None):
        is_own = name.split(".")[0] == self.own
        if is_own and any(kept == name or kept.startswith(name + ".") for kept in self.keep):
            return None
        if not is_own and importlib.machinery.PathFinder.find_spec(name, path) is not None:
            return None
        if name.split(".")[0] in sys.stdlib_module_names | {"torch", "numpy", "windlass"}:
            return None
        self.made.append(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Missing(spec.name)

    def exec_module(self, module):
        pass


class Tensor:
    """The size of a tensor, without its bytes."""

    def __init__(self, size, is_contiguous=True):
        self.size, self.contiguous = size, is_contiguous

    def numel(self):
        return self.size

    def element_size(self):
        return 1

    def is_contiguous(self):
        return self.contiguous


def chosen(name, value, plugin, **more):
    """What a value makes of the framework: the lines of the log."""
    log.seek(0)
    log.truncate()
    with mock.patch.dict(os.environ, {f"WINDLASS_{name.upper()}": value, **more}):
        os.environ.pop(f"{name.upper()}_NCCL_SO_PATH", None) if f"{name.upper()}_NCCL_SO_PATH" not in more else None
        plugin()
        return log.getvalue(), os.environ.get(f"{name.upper()}_NCCL_SO_PATH")


def refusals(name, plugin, owner, method):
    """Values and versions that must change nothing, with a word of the line that says so."""
    before = owner.__dict__[method]
    elsewhere = f"{name.upper()}_NCCL_SO_PATH"
    for value, more, word in [("off", {}, ""), ("8M-4M", {}, "8M-4M"), ("much", {}, "expected off, auto"), ("4K-64K,,8M-", {}, "''"),
                              ("auto", {}, "no interval"), (INTERVALS, {"WINDLASS": "off"}, "WINDLASS=off"),
                              (INTERVALS, {elsewhere: "/other/libnccl.so.2"}, "/other/libnccl.so.2")]:
        said, _ = chosen(name, value, plugin, **more)
        assert (word in said and said.count("\n") == 1) if word else not said, (value, said)
        assert owner.__dict__[method] is before, value
    with mock.patch.object(_plugins, "version", lambda _: "9.0.0"):
        said, _ = chosen(name, INTERVALS, plugin)
    assert "is 9.0.0, expected" in said and owner.__dict__[method] is before, said
    with mock.patch.object(owner, method, lambda self, tensor, more: None):
        unknown = owner.__dict__[method]
        said, _ = chosen(name, INTERVALS, plugin)
        assert "is unknown, expected" in said and owner.__dict__[method] is unknown, said


def vllm():
    communicator = importlib.import_module("vllm.distributed.device_communicators.cuda_communicator").CudaCommunicator
    refusals("vllm", _plugins.vllm, communicator, "all_reduce")
    theirs = communicator.all_reduce
    said, path = chosen("vllm", INTERVALS, _plugins.vllm)
    print(said, end="")
    assert communicator.all_reduce is not theirs and "fi_allreduce_fusion_max_size_mb" in said and path.endswith("libwindlass.so"), said

    def by(size, group="tp:0", is_contiguous=True, disabled=False):
        """Who sums: a communicator whose every other way answers with its name."""
        self = communicator.__new__(communicator)
        ways = {name: mock.MagicMock(disabled=True) for name in ("qr_comm", "fi_ar_comm", "aiter_ar_comm", "symm_mem_comm")}
        ways["fi_pcie_ipc_ar_comm"] = None
        self.__dict__.update(ways, unique_name=group, world_size=2, device_group=None, use_aiter_allreduce=False)
        self.pynccl_comm = mock.MagicMock(disabled=disabled, world_size=2)
        self.pynccl_comm.all_reduce.return_value = "NCCL"
        self.ca_comm = mock.MagicMock(disabled=False)
        self.ca_comm.custom_all_reduce.return_value = "CUSTOM"
        module = sys.modules[communicator.__module__]
        with mock.patch.object(module, "should_nccl_symm_mem_allreduce", lambda *_: False):
            return self.all_reduce(Tensor(size, is_contiguous))

    for size, is_inside in CASES:
        assert by(size) == ("NCCL" if is_inside else "CUSTOM"), size
    assert by(8192, group="ep:0") == by(8192, is_contiguous=False) == by(8192, disabled=True) == "CUSTOM"


def sglang():
    v2 = importlib.import_module("sglang.srt.distributed.device_communicators.custom_all_reduce_v2")
    communicator = v2.CustomAllReduceV2
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    plugin = lambda: (_plugins.sglang(), registry.apply_hooks())
    refusals("sglang", plugin, communicator, "should_custom_ar")
    theirs = communicator.should_custom_ar
    said, path = chosen("sglang", INTERVALS, plugin)
    print(said, end="")
    assert communicator.should_custom_ar is not theirs and path.endswith("libwindlass.so"), said

    def by(size, captures=True):
        self = communicator.__new__(communicator)
        self.__dict__.update(disabled=False, override_algo=object(), max_size=1 << 40, world_size=2, _can_use_graph=lambda: captures)
        return self.should_custom_ar(Tensor(size))

    with mock.patch.object(v2, "is_weak_contiguous", lambda _: True):
        for size, is_inside in CASES:
            # V2 itself leaves sizes to NCCL that are no multiple of 16.
            assert by(size) == (not is_inside and size % 16 == 0), size
        assert by(8192, captures=False) and by(128 << 10)


def main(name, source):
    sys.path.insert(0, source)
    keep = {"vllm": ["vllm.distributed.device_communicators.cuda_communicator", "vllm.distributed.device_communicators.base_device_communicator"],
            "sglang": ["sglang.srt.distributed.device_communicators.custom_all_reduce_v2", "sglang.srt.plugins.hook_registry"]}[name]
    finder = Finder(name, keep)
    sys.meta_path.insert(0, finder)
    logger = logging.getLogger(f"{name}.windlass")
    logger.addHandler(logging.StreamHandler(log))
    logger.setLevel(logging.INFO)
    library = Path(_plugins.__file__).parent / "lib" / "windlass" / "libwindlass.so"
    with mock.patch.object(_plugins, "library", lambda: str(library)), mock.patch.object(_plugins, "loaded", lambda: None):
        {"vllm": vllm, "sglang": sglang}[name]()
    release = _plugins.version(name)
    print(f"{name} {release}: the hook is in place, chooses by bytes and falls back ({len(finder.made)} modules stand empty)")


if __name__ == "__main__":
    main(*sys.argv[1:])
