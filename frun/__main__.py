"""`python -m frun` is the same program as `frun`."""

from frun.cli import main

main()
