"""Without a GPU the Triton kernels run through Triton's interpreter, which is chosen before they are
imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
