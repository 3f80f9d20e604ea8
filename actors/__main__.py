"""``python -m actors``: the command line (see ``actors.cli.main``)."""

from xidstream.actors.cli.main import main

if __name__ == "__main__":
    main()
