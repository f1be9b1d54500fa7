"""`python -m quota` is the command `quota`."""

from quota.cli.entry import main

if __name__ == "__main__":
    main()
