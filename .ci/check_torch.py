"""Fail when a machine without a GPU has ended up with the CUDA build of torch, which is 5 GB of no use to it."""

import sys

import torch

ADVICE = """\
torch {version} is a CUDA build, but this machine has no GPU that it can use. Do one of these and run make again:
  install the CPU build into this environment by hand (choose CPU in PyTorch's install selector),
  point pip at it with PIP_FLAGS="...",
  or keep this build with ALLOW_CUDA=1."""

if torch.version.cuda is not None and not torch.cuda.is_available() and "--allow-cuda" not in sys.argv[1:]:
    sys.exit(ADVICE.format(version=torch.__version__))
print(f"torch {torch.__version__}, {'CUDA' if torch.cuda.is_available() else 'CPU'}")
