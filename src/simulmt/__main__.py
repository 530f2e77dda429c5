"""Entry point of `simulmt` and of `python -m simulmt`, which torchrun runs."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C exits quietly, even during imports."""
    try:
        from simulmt.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
