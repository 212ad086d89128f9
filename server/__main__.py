"""`python -m server`: the `fermion` command where it is not installed."""

from server.cli import main

main()
