"""conftest.py: all tests run on the CPU, on one thread, so that sums are always added in the same
order, and the processes that they start buffer what they print, as they do for most users."""

import functools
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA is first asked for
os.environ.pop("PYTHONUNBUFFERED", None)

import torch


@functools.cache  # like torch's own function: torch 2.14 looks for what it wraps
def no_mps() -> bool:
    return False


torch.backends.mps.is_available = no_mps
torch.set_num_threads(1)
