"""device.py: where a program runs: device, precision, compilation, processes, memory."""

import math
import os
import platform
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config import UserError

# Dense bfloat16 TFLOP/s, from the vendors' data sheets. The first key found in a name counts.
# fmt: off
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "B200": 2250,
    "L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
}
# fmt: on
KEPT_BLOCK = 31 << 20  # bytes; glibc's malloc looks at no block above 32 MB
LONG_RUN = 500  # fewest steps that repay half a minute of compiling on a CPU


class Machine:
    """Where a program runs: as train.py's flags of these names ask, else the best choice. `steps`
    is the length of the run. Raises UserError if the device is not available."""

    def __init__(self, device=None, dtype=None, compile=None, steps: int = 0):
        self.rank, self.world = processes()
        self.device = find_device(device)
        if self.world > 1 and self.device.type == "mps":
            raise UserError("--device=mps runs one process at most; start without torchrun")
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        if self.device.type == "cpu":
            keep_freed_memory()
        if dtype is None:
            dtype = "bfloat16" if has_bfloat16(self.device) else "float32"
        if compile is None:  # on MPS it does not pay
            compile = on_cuda or (self.device.type == "cpu" and steps >= LONG_RUN)
        self.dtype = getattr(torch, dtype)  # of the matrix products
        self.compile = compile

    def __str__(self) -> str:
        n = torch.get_num_threads()
        name = f"{platform.machine()}, {n} thread{'' if n == 1 else 's'}"
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        return f"{self.device} {name}" + (f", one of {self.world}" if self.world > 1 else "")

    def join_processes(self) -> None:
        """Join the other processes of torchrun, if there are any."""
        if self.world > 1:
            on_cuda = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                timeout=timedelta(days=1),  # the first process's report takes time
                device_id=self.device if on_cuda else None,
            )

    def leave_processes(self, code: int) -> None:
        """Wait for the other processes, if there are any, and end this one with an exit code."""
        if self.world > 1:
            dist.barrier()  # the first process may still be reporting
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(code)  # on a normal exit, one of torch's threads sometimes aborts the process

    def autocast(self):
        narrow = self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrow)

    def peak_flops(self) -> float | None:
        """FLOP/s according to the data sheet, if known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        found = (peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name))
        return next((1e12 * peak for peak in found), None)


def keep_freed_memory() -> None:
    """Let malloc reuse what a step frees. Else it returns memory to the system after each step, and
    getting it back takes up to a seventh of mlm's step (NOTES.md, section 4). glibc's malloc keeps
    up to twice the size of the largest block that was ever freed; elsewhere this does nothing."""
    torch.empty(KEPT_BLOCK, dtype=torch.uint8)  # freed at once


def processes() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun sets them. Raises UserError."""
    rank = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE", "1")
    usable = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    if not usable or (int(world) > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        raise UserError(f"RANK={rank}, WORLD_SIZE={world}: unset both, or start with torchrun")
    return int(rank), int(world)


def sum_of_all(x: Tensor) -> Tensor:
    """Sum `x` over all processes, in place."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x)
    return x


def find_device(name: str | None) -> torch.device:
    """The named device, else the best one. Raises UserError if it cannot hold a tensor."""
    if name is None:
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            name = "cuda"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
            raise RuntimeError("it must be cpu, cuda, cuda:N or mps")
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:80].rstrip(".")
        raise UserError(f"--device={name}: {reason}; name another, such as --device=cpu") from None
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 matrices itself; emulation would be slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Only Linux has this file. A Mac (with MPS, too) does not, so it uses float32.
    return re.search("avx512_bf16|amx_bf16", _system_file("/proc/cpuinfo")) is not None


def free_memory() -> float:
    """At most how many bytes of main memory a program may still take; infinite if unknown."""
    available = re.search(r"MemAvailable: +(\d+) kB", _system_file("/proc/meminfo"))
    of_container = re.match(r"\d+", _system_file("/sys/fs/cgroup/memory.max"))
    limits = [int(available[1]) * 1024] if available else []
    if of_container:
        limits.append(int(of_container[0]))  # some of it may already be taken
    return min(limits, default=math.inf)


def _system_file(path: str) -> str:
    """The text of a Linux system file; "" on other systems, or if it may not be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
