"""``python -m actors``: the command line (see ``actors.cli``)."""

from xidstream.actors.cli import main

if __name__ == "__main__":
    main()
