"""A host of the demo: the store process as ``tiertune store serve`` runs it, its remote behind the throttled link."""

import argparse
import logging
import time
from pathlib import Path
from typing import cast

from tiertune_agent.demo.throttle import ThrottledTier, link_rate
from tiertune_connector.serve.main import StoreProcess, run
from tiertune_connector.settings import load
from tiertune_connector.tiers.base import Tier


def main() -> None:
    """``--config`` is that of ``tiertune store serve``, ``--link`` the file that says how fast the remote may be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--link", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    rate = link_rate(arguments.link)

    def throttled(tier: Tier) -> Tier:
        slow = ThrottledTier(tier, lambda: float(rate[0]), clock=time.monotonic, sleep=time.sleep)
        return cast("Tier", slow)

    run(StoreProcess(load(arguments.config), wrap_remote=throttled))


if __name__ == "__main__":
    main()
