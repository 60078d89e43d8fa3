"""A host of the demo: the store process as ``tiertune store serve`` runs it, its remote behind the throttled link."""

import argparse
import logging
import time
from pathlib import Path

from tiertune_agent.demo.throttle import LinkRate, ThrottledTier
from tiertune_connector.serve.main import StoreProcess, run
from tiertune_connector.settings import load


def main() -> None:
    """``--config`` is that of ``tiertune store serve``, ``--link`` the file that says how fast the remote may be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--link", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    link = LinkRate(arguments.link)
    settings = load(arguments.config)
    run(
        StoreProcess(
            settings,
            wrap_remote=lambda tier: ThrottledTier(
                tier, lambda: link.bytes_per_s, clock=time.monotonic, sleep=time.sleep
            ),
        )
    )


if __name__ == "__main__":
    main()
