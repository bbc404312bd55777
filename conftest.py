"""conftest.py: all tests run on the CPU, on one thread, so that sums are always added in the same
order."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA is first asked for

import torch

torch.backends.mps.is_available = lambda: False
torch.set_num_threads(1)
