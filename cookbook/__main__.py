"""``python -m cookbook`` is the command ``cookbook``."""

from cookbook.cli.app import main

main()
