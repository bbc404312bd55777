"""conftest.py: all tests run on one thread, so that sums are always added in the same order."""

import torch

torch.set_num_threads(1)
