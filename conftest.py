"""conftest.py: all tests compute on one thread, so that sums are made in one order."""

import torch

torch.set_num_threads(1)
