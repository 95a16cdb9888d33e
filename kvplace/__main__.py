"""`python -m kvplace` is the command `kvplace`."""

from kvplace.cli.main import main

if __name__ == "__main__":
    main()
