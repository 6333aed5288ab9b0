"""Compile every CUDA kernel for sm_90a and print registers, spills and shared memory; needs no GPU.

Fails when an entry spills more than its budget in kernels/sm90/programs.toml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pwbench.kernels import main

if __name__ == "__main__":
    sys.exit(main())
