"""``python -m tiertune_connector.serve CONFIG``: a store where the command line is not installed."""

import argparse
import sys

from tiertune_connector.ending import heed_sigterm

if __name__ == "__main__":
    heed_sigterm()  # before what takes a second to import

from tiertune_connector.documents import DocumentError, FieldError
from tiertune_connector.serve.main import StartError, serve
from tiertune_connector.settings import load
from tiertune_connector.state import StateError


def main(arguments: list[str]) -> int:
    """Serve until the store ends; 2 and a message if it cannot start."""
    parser = argparse.ArgumentParser("python -m tiertune_connector.serve", description="Serve a store until stopped.")
    parser.add_argument("config", metavar="CONFIG", help="the store's settings, a YAML file")
    config = parser.parse_args(arguments).config
    try:
        serve(load(config))
    except (DocumentError, FieldError, StartError, StateError) as error:
        sys.stderr.write(f"the store cannot start: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
