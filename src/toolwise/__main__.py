"""Entry point of `python -m toolwise`."""

from toolwise.cli import main

main()
