"""Checks of what stores and agent depend on: the remote's servers, a measured storage. Pure."""

from tiertune_agent.doctor.facts import ServerFacts, StorageFacts
from tiertune_agent.doctor.finding import Told, of_server, of_storage
from tiertune_connector.units import format_size


@of_server("error")
def remote_unreachable(server: ServerFacts) -> Told:
    if server.problem:
        mend = "start it, or mend address, user, rights, password (TIERTUNE_REMOTE_PASSWORD, password_file) or tls"
        yield f"the remote does not answer: {server.problem}", mend


@of_server("warning")
def remote_unbounded(server: ServerFacts) -> Told:
    if server.maxmemory == 0:
        wrong = f"maxmemory is 0: it holds {format_size(server.used_bytes)}, and grows until its host has no memory"
        yield wrong, "set maxmemory, or let the agent (remote: {manage: true} in the policy)"


@of_server("warning")
def remote_keeps_all(server: ServerFacts) -> Told:
    if server.policy == "noeviction" or server.policy.startswith("volatile-"):
        wrong = f"maxmemory-policy is {server.policy}: chunks never leave, and when it is full nothing new is kept"
        yield wrong, "set maxmemory-policy allkeys-lru, or let the agent (remote.manage)"


@of_storage("error")
def storage_failed(storage: StorageFacts) -> Told:
    if storage.problem:
        mend = (
            "is it there, has it room, may we write? A directory is not made; a Redis's password is read from "
            "TIERTUNE_REMOTE_PASSWORD, or by --config from a store's settings"
        )
        yield f"it could not be measured: {storage.problem}", mend


@of_storage("warning")
def storage_slow(one: StorageFacts) -> Told:
    if not one.problem and one.fetch_s >= one.recompute_s:
        wrong = (
            f"fetching {one.prompt_tokens:,} tokens of {one.model} takes {1e3 * one.fetch_s:.0f} ms at "
            f"{one.bytes_per_s / 1e6:.0f} MB/s, recomputing them on {one.gpu} {1e3 * one.recompute_s:.0f} ms: "
            f"it breaks even at {one.break_even_tokens:,.0f} tokens"
        )
        yield wrong, "a faster storage or link; for shorter prompts than that leave the tier out"
