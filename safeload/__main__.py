"""`python -m safeload`: the command."""

from __future__ import annotations

import sys

from safeload import cli


def main() -> None:
    """Run the command and leave with its exit code."""
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
