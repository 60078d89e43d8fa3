"""A host of the demo: the store process as ``tiertune store serve`` runs it, its remote behind the throttled link."""

import logging
import sys
import time
from pathlib import Path
from typing import cast

from tiertune_agent.demo.throttle import ThrottledTier, link_rate
from tiertune_connector.serve.main import StoreProcess, run
from tiertune_connector.settings import load
from tiertune_connector.tiers.base import Tier


def main() -> None:
    """The arguments are the settings of ``tiertune store serve``, and the file that says how fast the remote may be."""
    config, link = map(Path, sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    rate = link_rate(link)

    def throttled(tier: Tier) -> Tier:
        slow = ThrottledTier(tier, lambda: float(rate[0]), clock=time.monotonic, sleep=time.sleep)
        return cast("Tier", slow)

    run(StoreProcess(load(config), wrap_remote=throttled))


if __name__ == "__main__":
    main()
