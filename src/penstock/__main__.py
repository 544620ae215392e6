"""The `penstock` command; `python -m penstock` is the same."""

import sys

from penstock.service.exit_codes import INTERRUPTED


def main() -> None:
    """Load the command and run it; a Ctrl-C while it loads is as quiet as later on."""
    try:
        from penstock.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
