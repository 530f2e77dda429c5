"""`python -m simulmt`, which is also how torchrun starts it."""

from simulmt.cli import main

if __name__ == "__main__":
    main()
