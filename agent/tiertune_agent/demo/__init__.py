"""The whole loop on one machine: two hosts, four engines, a remote that is slowed for a third of the time, an agent."""
