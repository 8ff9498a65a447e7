"""`python -m pdrt` is the `pdrt` command."""

from pdrt.cli import main

main()
