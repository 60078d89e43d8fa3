"""The doctor gathers its facts from settings files, real storage, a real Redis and real stores."""

import signal

import pytest
import redis

from connector.stores import eventually, short_folder
from e2e.servers import redis_server
from tiertune_agent.doctor.command import Endpoints, is_store, weighed
from tiertune_agent.doctor.facts import StorageFacts
from tiertune_agent.settings import AgentSettings, HttpSettings
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.documents import parse_yaml
from tiertune_connector.keys import Namespace
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.settings import StoreSettings

STORE = """
name: host-a
socket: {folder}/s.sock
state_dir: {folder}/state
http: {{port: 0}}
dram: {{capacity: 8MiB, segment: 1MiB}}
"""


class TestFiles:
    def test_a_store_is_told_from_an_agent_by_its_keys(self, tmp_path):
        """Whatever is neither is read as an agent's, whose reader names the mistake."""
        for text, expected in (
            (STORE.format(folder=tmp_path), True),
            ("stores: [{url: 'http://127.0.0.1:1'}]\n", False),
            ("- a\n", False),
            ("{", False),
            ("stores: 2024-13-45\n", False),
            ("[" * 100_000, False),
        ):
            (tmp_path / "s.yaml").write_text(text)
            assert is_store(tmp_path / "s.yaml") is expected

    @pytest.mark.parametrize(("everywhere", "here"), [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")])
    def test_what_serves_on_all_addresses_is_asked_on_this_host(self, tmp_path, everywhere, here):
        """No certificate names all of them."""
        (tmp_path / "http").write_text(f"https://{everywhere}:7410\n")
        (tmp_path / "tokens").write_text(f"read a {32 * 'x'}\n")
        endpoints = Endpoints()
        endpoints.add_store("host-a", tmp_path)
        assert endpoints.stores == {f"https://{here}:7410": "host-a"}
        http = HttpSettings(host=everywhere.strip("[]"), tokens_file=tmp_path / "tokens")
        stores = [{"url": "http://127.0.0.1:9"}]
        endpoints.add_agent(AgentSettings(database=f"sqlite:///{tmp_path}/a.sqlite", stores=stores, http=http))
        assert endpoints.agent == f"http://{here}:7420"

    def test_a_store_that_never_ran_is_not_checked(self, tiertune, tmp_path):
        """Its file alone tells no address; nothing is wrong with it, as far as one can see."""
        (tmp_path / "s.yaml").write_text(STORE.format(folder=tmp_path))
        code, out, _ = tiertune("doctor", "--config", tmp_path / "s.yaml")
        assert code == 0
        assert "not checked: store host-a: it has not served on this host" in " ".join(out.split())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ("--storage gopher://x", "--storage: expected a redis://"),
            ("--storage file:///nowhere-at-all --model gpt", "--model: unknown name 'gpt'"),
            ("--storage file:/// --gpu abacus", "--gpu: unknown name 'abacus'"),
            ("--agent nonsense", "--agent: write the agent's address as http://host:port"),
            ("--engine engine:8000", "--engine: write an engine's address as http://host:port"),
            ("--engine http://user:word@engine:8000", "no user and no password"),
            ("--config nowhere.yaml", "nowhere.yaml: cannot be read"),
        ],
    )
    def test_wrong_usage_is_exit_2(self, tiertune, arguments, said):
        """One message that says what to mend."""
        code, _, err = tiertune("doctor", *arguments.split())
        assert (code, said in err) == (2, True), err


def measured(tiertune, url, *more):
    """What is told of a storage, and the exit status."""
    done, document = tiertune.json("doctor", "--storage", url, *more)
    told = document["storage"]
    assert (done.stderr, told["problem"]) == ("", "")
    assert told["bytes_per_s"] > 0
    assert "break-even" in done.stdout
    return told, done.returncode


class TestStorage:
    def test_a_folder_is_measured_and_left_as_it_was(self, tiertune, tmp_path):
        """Latency, bandwidth and the break-even; exit 0 where fetching wins, and nothing stays behind."""
        (tmp_path / "tier").mkdir()
        told, code = measured(tiertune, f"file://{tmp_path}/tier", "--model", "llama-3-8b", "--gpu", "a10")
        assert told["latency_s"] > 0
        assert code == int(told["fetch_s"] >= told["recompute_s"])
        assert list((tmp_path / "tier").iterdir()) == []

    def test_a_folder_that_is_away_is_found(self, tiertune, tmp_path):
        """It is not made: exit 1 and what failed."""
        code, out, _ = tiertune("doctor", "--storage", f"file://{tmp_path}/away")
        assert (code, "write: error" in out) == (1, True)
        assert not (tmp_path / "away").exists()

    def test_what_was_measured_is_weighed_by_the_closed_form(self):
        """A token of llama-3-8b is 128 KiB: at 1 GB/s 8,000 of them take 1.05 s and a latency; an H100 needs 0.27 s."""
        told = weighed(StorageFacts("file:///x", 0.001, 1e9, 4e8), model="llama-3-8b", gpu="h100")
        assert told.fetch_s == pytest.approx(0.001 + 8000 * 131072 / 1e9)
        assert told.recompute_s == pytest.approx((2 * 8.03e9 * 8000 + 2 * 32 * 4096 * 8000**2) / (989e12 / 2))
        per_token, linear, quadratic = 131072 / 1e9, 2 * 8.03e9 / (989e12 / 2), 2 * 32 * 4096 / (989e12 / 2)
        assert told.break_even_tokens == pytest.approx((per_token - linear) / quadratic)


@pytest.mark.real
def test_a_redis_is_measured_and_left_as_it_was(tiertune):
    """The tier of a store itself: its chunks, by its windows; other keys stay as they are."""
    with redis_server(maxmemory="256mb") as server:
        _, code = measured(tiertune, server.url)
        assert code in (0, 1)
        with redis.Redis(port=server.port) as raw:
            assert raw.dbsize() == 0


@pytest.mark.real
def test_a_redis_without_its_password_is_told_where_to_give_it(tiertune, monkeypatch):
    """The mend names the variable, and with that it is measured."""
    with redis_server(maxmemory="256mb", options=["--requirepass", "a long password"]) as server:
        asked = ("doctor", "--storage", f"redis://127.0.0.1:{server.port}/0")
        assert "TIERTUNE_REMOTE_PASSWORD" in tiertune(*asked)[1]
        monkeypatch.setenv("TIERTUNE_REMOTE_PASSWORD", "a long password")
        assert "break-even" in tiertune(*asked)[1]


@pytest.mark.real
@pytest.mark.slow
def test_a_real_fleet_with_a_stopped_redis_and_two_seeds(tiertune):
    """Two stores on one Redis, an engine at each with another PYTHONHASHSEED; then Redis hangs: all of it is named."""
    with short_folder() as one, short_folder() as two, redis_server(policy="noeviction") as server:
        remote = f'remote: {{url: "{server.url}", timeout: 3s, probe_every: 0.2s}}\n'
        stores, clients, files = [], [], []
        try:
            for seed, folder in enumerate((one, two)):
                text = STORE.format(folder=folder).replace("host-a", f"host-{seed}") + remote
                files += ["--config", folder / "store.yaml"]
                files[-1].write_text(text)
                stores.append(StoreProcess(parse_yaml(text, StoreSettings, name="store.yaml")))
                stores[-1].start()
                space = Namespace(model="llama", weights="w", hash_algorithm="xxhash", hash_seed=str(seed))
                clients.append(
                    StoreClient(
                        folder / "s.sock", space, chunk_bytes=65536, chunk_tokens=256, engine=f"e{seed}", stage="all"
                    )
                )
                assert clients[-1].connect()

            def told():
                done, document = tiertune.json("doctor", *files)
                return done.returncode, {finding["check"]: finding for finding in document["findings"]}

            code, found = told()
            assert code == 1
            assert set(found) == {"namespaces_differ", "remote_keeps_all"}
            assert "e0 at host-0 | e1 at host-1" in found["namespaces_differ"]["wrong"]
            assert "differ in hash_seed" in found["namespaces_differ"]["wrong"]
            assert "PYTHONHASHSEED" in found["namespaces_differ"]["mend"]
            server.process.send_signal(signal.SIGSTOP)
            eventually(lambda: all(each.store.health.told("remote")[0] == "dead" for each in stores))
            code, found = told()
            assert code == 1
            assert {"namespaces_differ", "tier_dead", "remote_unreachable"} <= set(found)
        finally:
            server.process.send_signal(signal.SIGCONT)
            for client in clients:
                client.close()
            for store in stores:
                store.stop()
