"""Says what is wrong with a deployment and how to mend it: gathers facts, checks them, reports findings."""
