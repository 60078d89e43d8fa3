"""What the fleet's requests would have cost with tiers of other sizes."""
