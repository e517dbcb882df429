"""Leaves all-reduces of vLLM and SGLang to Windlass, by the doors that these two have for plugins.

Asleep unless ``WINDLASS_VLLM`` or ``WINDLASS_SGLANG`` is ``auto`` or intervals of bytes (``4K-64K,8M-``). What decides is the variable and
the size of the tensor, so ranks whose variables are equal agree. Whatever is unknown changes nothing, and one line of the log says so.
"""

import functools
import inspect
import logging
import os
import re
from importlib import import_module
from importlib.metadata import version
from typing import Any, Callable, Dict, List, Tuple

from ._files import library
from ._loaded import loaded

Intervals = List[Tuple[int, float]]
#: Whether an all-reduce of so many ranks goes to Windlass, by its tensor.
Takes = Callable[[int, Any], bool]

#: What ``auto`` stands for, by ranks: where Windlass was measured ahead of the framework's own all-reduce. Nothing is, as long as it was not.
AUTO: Dict[str, Dict[int, str]] = {"vllm": {}, "sglang": {}}

_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30}
_EXPECTED = "expected off, auto or intervals of bytes as 4K-64K,8M-"


def intervals(text: str) -> Intervals:
    """The intervals of a text, both ends included; raises `ValueError` with what is wrong."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)-(?:(\d+)([KMG]?))?", part.strip().upper())
        ends = [int(match[end]) << _SHIFTS[match[end + 1]] if match[end] else float("inf") for end in (1, 3)] if match else [1, 0]
        if ends[1] < ends[0]:
            raise ValueError(f"{part.strip()!r}, {_EXPECTED}")
        found.append((int(ends[0]), ends[1]))
    return found


def vllm() -> None:
    """The entry point of ``vllm.general_plugins``."""
    _enter("vllm", "0.26.0", "0.33.0", _hook_vllm)


def sglang() -> None:
    """The entry point of ``sglang.srt.plugins``."""
    _enter("sglang", "0.5.17", "0.5.23", _hook_sglang)


def _enter(name: str, oldest: str, newest: str, hook: Callable[[Takes], str]) -> None:
    """Puts the hook in place, or says why not. Never raises: the framework must start as ever."""
    key = f"WINDLASS_{name.upper()}"
    chosen = os.environ.get(key, "off")
    if chosen.lower() in ("off", ""):
        return
    # The frameworks print what loggers below their own names say.
    log = logging.getLogger(f"{name}.windlass")
    try:
        is_auto = chosen.lower() == "auto"
        measured = {ranks: intervals(text) for ranks, text in AUTO[name].items()}
        always = [] if is_auto else intervals(chosen)
        if os.environ.get("WINDLASS", "").lower() in ("off", "0", "no", "false"):
            raise ValueError("WINDLASS=off is set")
        if is_auto and not measured:
            raise ValueError("no interval is known in which Windlass is ahead; name intervals, as 8M-")
        if not _numbers(oldest) <= _numbers(version(name)) <= _numbers(newest):
            raise ValueError(f"{name} is {version(name)}, expected {oldest} to {newest}")

        def takes(ranks: int, tensor: Any) -> bool:
            size = tensor.numel() * tensor.element_size()
            return any(low <= size <= high for low, high in (measured.get(ranks, []) if is_auto else always))

        path = _open_instead(f"{name.upper()}_NCCL_SO_PATH")
        lows = sorted({low / (1 << 20) for ranges in (measured.values() if is_auto else [always]) for low, _ in ranges})
        log.info("windlass: %s=%s: %s; NCCL is %s", key, chosen, hook(takes).format(lows=" or ".join(f"{low:g}" for low in lows)), path)
    except Exception as error:
        log.warning("windlass: %s=%s changes nothing: %s", key, chosen, error)


def _hook_vllm(takes: Takes) -> str:
    communicator = import_module("vllm.distributed.device_communicators.cuda_communicator").CudaCommunicator
    theirs = communicator.all_reduce
    _known(theirs, ["self", "input_"], "pynccl_comm")

    @functools.wraps(theirs)
    def all_reduce(self: Any, input_: Any) -> Any:
        nccl = self.pynccl_comm
        if self.unique_name.split(":")[0] == "tp" and nccl is not None and not nccl.disabled and input_.is_contiguous():
            if takes(self.world_size, input_):
                return nccl.all_reduce(input_)
        return theirs(self, input_)

    communicator.all_reduce = all_reduce
    return ("all-reduces of these sizes go to NCCL's functions. vLLM's all-reduce that is fused with the norm comes first: "
            "--compilation-config '{{\"pass_config\": {{\"fi_allreduce_fusion_max_size_mb\": N}}}}' leaves those above N MiB; N is {lows}")


def _hook_sglang(takes: Takes) -> str:
    target = "sglang.srt.distributed.device_communicators.custom_all_reduce_v2"
    communicator = import_module(target).CustomAllReduceV2
    _known(communicator.should_custom_ar, ["self", "inp"], "disabled", "_can_use_graph")
    registry = import_module("sglang.srt.plugins.hook_registry")

    def should_custom_ar(theirs: Callable[[Any, Any], bool], self: Any, inp: Any) -> bool:
        # Only in graphs SGLang opens NCCL by its path: eager calls go to PyTorch's.
        return not (self._can_use_graph() and takes(self.world_size, inp)) and theirs(self, inp)

    registry.HookRegistry.register(f"{target}.CustomAllReduceV2.should_custom_ar", should_custom_ar, registry.HookType.AROUND)
    return "all-reduces of these sizes go to NCCL's functions in graphs"


def _known(function: Any, parameters: List[str], *names: str) -> None:
    """Raises where a function of the framework is not the one that was read."""
    found = list(inspect.signature(function).parameters)
    if found != parameters or not set(names) <= set(function.__code__.co_names):
        raise ValueError(f"{function.__qualname__}({', '.join(found)}) is unknown, expected ({', '.join(parameters)}) with {', '.join(names)}")


def _open_instead(key: str) -> str:
    """The NCCL that the framework opens: Windlass, or it raises."""
    found = loaded()
    if found is not None and found.is_windlass:
        return found.path
    path = os.environ.setdefault(key, library())
    if os.path.basename(path) != "libwindlass.so":
        raise ValueError(f"{key} is {path}, expected a path of libwindlass.so, or none")
    return path


def _numbers(release: str) -> List[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:3]]
