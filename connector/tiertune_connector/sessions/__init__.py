"""Who uses a store: its clients, what they hold of DRAM, their namespaces and tenants."""
