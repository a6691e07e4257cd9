"""The terminal block of the README: train, kill one worker, watch the others go on.

    python -m benchmarks.demo

Prints what a person sees on one terminal, standard output and error together.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANK = 2
AT = "step 100/"


def main() -> None:
    """Run the example, kill rank 2 at step 100, and print every line as it comes."""
    # Without --preload the newcomer would spend its time importing scikit-learn.
    command = ["frun", "--nproc-per-node", "4", "--preload", "sklearn.datasets"]
    command.append("examples/train_resumable.py")
    print("$", *command)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    victim = 0
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            pid = re.match(rf"rank {RANK}, pid (\d+): begins at step 0", line)
            if pid:
                victim = int(pid[1])
            if line.startswith(AT) and victim:
                print(f"                                        (elsewhere: kill -9 {victim})")
                os.kill(victim, signal.SIGKILL)
                victim = 0
    print(f"exit status {process.returncode}")


if __name__ == "__main__":
    main()
