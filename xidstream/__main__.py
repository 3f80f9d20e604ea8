"""``python -m xidstream``: the command line."""

from xidstream.actors.cli.main import main

if __name__ == "__main__":
    main()
