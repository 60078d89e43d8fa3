"""The gate behind a slow link, with a backlog that seems to hide every fetch: it wins more than it loses."""

import numpy as np
import pytest

from connector.slow_link import Host, stream
from connector.ways import Way

MIB = 1 << 20
SEEDS = range(4)


def play(mib_per_s, per_s, seed, **host):
    return Host(Way(now=-30.0), bytes_per_s=mib_per_s * MIB, seed=seed, **host).play(stream(300, per_s, seed))


@pytest.mark.parametrize(("mib_per_s", "per_s"), [(8, 1.2), (8, 4.5), (32, 4.5), (128, 4.5)])
def test_it_saves_far_more_than_it_loses(mib_per_s, per_s):
    """Seconds lost are at most a tenth of those saved, and few loads are late."""
    runs = [play(mib_per_s, per_s, seed) for seed in SEEDS]
    assert sum(run.lost_s for run in runs) <= 0.1 * sum(run.saved_s for run in runs)
    assert sum(run.late for run in runs) <= 0.06 * sum(run.fetches for run in runs)


@pytest.mark.parametrize("mib_per_s", [8, 32, 128])
def test_first_tokens_come_earlier_where_others_count(mib_per_s):
    """Than where each request takes itself to be the only one, on a busy engine: 2 to 17 per cent of the mean."""
    others, alone = ([play(mib_per_s, 4.5, seed, alone=each) for seed in SEEDS] for each in (False, True))
    mean, mean_alone = (np.concatenate([run.ttft_s for run in runs]).mean() for runs in (others, alone))
    assert mean <= 0.98 * mean_alone
    assert sum(run.late for run in others) <= sum(run.late for run in alone) + 1


@pytest.mark.parametrize("mib_per_s", [2, 8, 32])
def test_first_tokens_come_no_later_than_without_fetching(mib_per_s):
    """On a busy engine: mean and p99 over all seeds, and the p99 of each by a tenth at most."""
    pairs = [(play(mib_per_s, 4.5, seed), play(mib_per_s, 4.5, seed, gate=False)) for seed in SEEDS]
    fetched, never = (np.concatenate([pair[side].ttft_s for pair in pairs]) for side in (0, 1))
    assert fetched.mean() <= never.mean()
    assert np.percentile(fetched, 99) <= np.percentile(never, 99)
    for run, without in pairs:
        assert len(run.ttft_s) == len(without.ttft_s) == 300
        assert np.percentile(run.ttft_s, 99) <= 1.1 * np.percentile(without.ttft_s, 99)


def test_the_link_is_left_alone_where_it_never_pays():
    """Without a backlog a chunk from 2 MiB/s costs sixty times its recompute."""
    assert play(2, 0.2, 0).fetches == 0
