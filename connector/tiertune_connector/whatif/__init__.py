"""What tiers of other sizes, or with other algorithms, would have earned. Pure: no I/O, no clock."""
