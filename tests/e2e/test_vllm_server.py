"""vLLM's API server with two data-parallel ranks that demand a salt: sharing, metrics, KV events."""

import json
from collections import defaultdict

from e2e.servers import wait_until
from e2e.vllm_engines import CHUNK_TOKENS, EXTERNAL_HITS, Request, differences, of_engines
from e2e.vllm_fixtures import CHUNK_BYTES, chunks, prompts
from e2e.vllm_server import BLOCK_TOKENS, GPU_BLOCKS, RANKS
from tiertune_agent.engines import Engines

pytestmark = of_engines(600)

SALT = "tenant"
COUNTERS = ("vllm:kv_offload_tiering_read_bytes_total", "tiertune_engine_fetched_tokens_total")
STAGED_BLOCKS = 32 * 2**20 // CHUNK_BYTES * CHUNK_TOKENS // BLOCK_TOKENS


def hits(server, rank):
    return server.metric(f"{EXTERNAL_HITS}_total", engine=str(rank))


def found(server):
    """Tokens of prompts that were there, in all ranks' own caches and beyond."""
    names = ("vllm:prefix_cache_hits_total", f"{EXTERNAL_HITS}_total")
    return sum(server.metric(name, engine=str(rank)) for name in names for rank in range(RANKS))


def test_ranks_of_one_server_share_and_count_it_in_vllms_metrics(fleet, reference, dp_server):
    """Rank 1 answers what rank 0 computed: tokens of every whole chunk come from the store, as vLLM's counters say."""
    asked = [Request(prompt, salt=SALT) for prompt in prompts(2, seed=51)]
    expected = fleet.expected(asked)
    before = fleet.host_a.resident()
    first = [dp_server.generate(request, rank=0) for request in asked]
    assert differences(first, expected) == []
    assert hits(dp_server, 0) == 0
    fleet.host_a.wait_resident(before + chunks(asked) * CHUNK_BYTES)

    second = [dp_server.generate(request, rank=1) for request in asked]
    assert differences(second, expected) == []
    assert hits(dp_server, 1) >= chunks(asked) * CHUNK_TOKENS
    assert hits(dp_server, 0) == 0
    told = {name: dp_server.metric(name, engine="1") for name in COUNTERS}
    assert told["vllm:kv_offload_tiering_read_bytes_total"] >= chunks(asked) * CHUNK_BYTES, told
    assert told["tiertune_engine_fetched_tokens_total"] >= chunks(asked) * CHUNK_TOKENS, told


def test_without_a_salt_nothing_is_read_or_written(fleet, reference, dp_server):
    """`isolation: require_salt`: the ranks do not share an unsalted prompt, and the store never hears of it."""
    asked = prompts(1, seed=52)
    expected = fleet.expected(asked)
    resident, found = fleet.host_a.resident(), [hits(dp_server, rank) for rank in range(RANKS)]
    looked = fleet.host_a.http.total("prompt_tokens_total")
    for rank in range(RANKS):
        assert differences([dp_server.generate(Request(asked[0]), rank=rank)], expected) == []
    salted = prompts(1, seed=53)  # what is stored after it shows that the unsalted would have been by now
    dp_server.generate(Request(salted[0], salt=SALT), rank=0)
    fleet.host_a.wait_resident(resident + chunks(salted) * CHUNK_BYTES)
    assert fleet.host_a.resident() == resident + chunks(salted) * CHUNK_BYTES
    assert [hits(dp_server, rank) for rank in range(RANKS)] == found
    expected_tokens = looked + len(salted[0])
    wait_until(lambda: fleet.host_a.http.total("prompt_tokens_total") >= expected_tokens, "the lookup is counted")
    assert fleet.host_a.http.total("prompt_tokens_total") == expected_tokens


class Index:
    """What a cache-aware router knows of one rank: the blocks of every medium, by the events alone."""

    def __init__(self):
        self.blocks = defaultdict(dict)
        self.counts = defaultdict(int)

    def hear(self, event):
        self.counts[event["type"], event.get("medium")] += 1
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        known = self.blocks[event["medium"]]
        if event["type"] == "BlockRemoved":
            for block in event["hashes"]:
                known.pop(block, None)
            return
        parent, size = event["parent"], event["block_size"]
        for number, block in enumerate(event["hashes"]):
            known[block] = (parent, tuple(event["tokens"][number * size : (number + 1) * size]))
            parent = block

    def covers(self, prompt, medium):
        """Leading tokens of a prompt that a medium holds, found as a router does: from block to block."""
        children = {(parent, tokens): block for block, (parent, tokens) in self.blocks[medium].items()}
        parent, end = None, 0
        while (block := children.get((parent, tuple(prompt[end : end + BLOCK_TOKENS])))) is not None:
            parent, end = block, end + BLOCK_TOKENS
        return end


def test_kv_events_stay_complete(fleet, reference, dp_server):
    """From the events alone a router knows each rank's blocks: the last prompts', and never more than there are."""
    asked = prompts(12, seed=54, prefix=0, tail=900)
    for prompt in asked:
        dp_server.generate(Request(prompt, salt=SALT), rank=0, max_tokens=2)
    last = asked[-1]
    whole = len(last) // CHUNK_TOKENS * CHUNK_TOKENS
    wait_until(lambda: listen(dp_server, 0).covers(last, "CPU") >= whole, "all events of staging have come")

    index = listen(dp_server, 0)
    assert index.covers(last, "GPU") >= len(last) // BLOCK_TOKENS * BLOCK_TOKENS
    assert 0 < len(index.blocks["GPU"]) <= GPU_BLOCKS
    assert 0 < len(index.blocks["CPU"]) <= STAGED_BLOCKS
    assert index.counts["BlockRemoved", "GPU"] > 0
    assert index.counts["BlockRemoved", "CPU"] > 0
    assert index.covers(asked[0], "GPU") == 0, "the first prompt has left the device long since"

    dp_server.generate(Request(last, salt=SALT), rank=1, max_tokens=2)
    wait_until(lambda: listen(dp_server, 1).covers(last, "GPU") >= whole, "rank 1 tells of blocks that it has loaded")


def listen(server, rank):
    """The index after all events of a rank so far; none may be lost on the way."""
    events = [event for event in server.heard() if event["rank"] == rank]
    numbers = sorted({event["sequence"] for event in events})
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    index = Index()
    for event in events:
        index.hear(event)
    return index


def test_it_is_warmed_examined_and_flushed_by_command(fleet, dp_server, tiertune, tmp_path):
    """Documents are there before anybody asks; after a flush of engine and store they are in neither of them."""
    asked, path = prompts(2, seed=55, prefix=0, tail=600), tmp_path / "warm.jsonl"
    whole = 2 * (600 // CHUNK_TOKENS) * CHUNK_TOKENS
    path.write_text("".join(f"{json.dumps({'token_ids': prompt})}\n" for prompt in asked))

    def warm(cached):
        """``cached``: tokens of the documents that were there, in the engine or in its store."""
        had = found(dp_server)
        done = tiertune("prewarm", path, "--engine", dp_server.url, "--salt", SALT, "--json", tmp_path / "w.json")
        assert done.returncode == 0, done.stderr
        told = json.loads((tmp_path / "w.json").read_text())["engines"][dp_server.url]
        assert told["prompt_tokens"] == 1200
        assert found(dp_server) == had if cached == 0 else found(dp_server) >= had + cached

    before = fleet.host_a.resident()
    warm(0)
    fleet.host_a.wait_resident(before + whole // CHUNK_TOKENS * CHUNK_BYTES)
    warm(whole)

    done = tiertune("doctor", "--engine", dp_server.url, "--json", tmp_path / "d.json")
    assert "1 engine" in done.stdout
    errors = [one for one in json.loads((tmp_path / "d.json").read_text())["findings"] if one["severity"] == "error"]
    assert errors == []

    assert Engines([dp_server.url]).reset() == {dp_server.url: {"ok": True, "reason": "ok"}}
    warm(whole)  # the store still has them
    assert Engines([dp_server.url]).reset()[dp_server.url]["ok"]
    assert fleet.host_a.http.post("/v1/flush", {}).is_success
    warm(0)
