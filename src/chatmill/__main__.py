"""The command line, as `python -m chatmill`."""

from chatmill.cli import main

if __name__ == "__main__":
    main()
