"""The two launchers that are compared, and where this project is."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
    "frun": (sys.executable, "-m", "frun"),
}
