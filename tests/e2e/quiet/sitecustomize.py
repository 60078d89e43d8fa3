"""For every Python process of an engine under test: whoever waits for another process sleeps, and does not yield.

vLLM's processes call ``sched_yield`` in a loop for a second after each message. Linux 6.18 charges a thread that yields
its whole time slice, and a thread that wakes is placed behind that: beside a busy thread it may wait ten seconds.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0.0002)
