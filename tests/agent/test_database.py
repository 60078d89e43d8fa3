"""The database's address, engine and migrations, on both backends."""

import json
import sqlite3
import time
from types import SimpleNamespace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import START, remember
from connector.stores import at_once
from e2e.postgres import PASSWORD
from tiertune_agent.demo.ports import free_port
from tiertune_agent.history.database import (
    DatabaseError,
    UnusableError,
    _document,
    _written,
    connect,
    open_current,
    revisions,
    shown,
    upgrade,
)
from tiertune_agent.history.models import Base, StoreRow
from tiertune_agent.history.store import History

pytestmark = pytest.mark.slow

WRONG_PARAMETERS = [
    "sslmod=require",
    "sslmode=foo",
    "connect_timeout=soon",
    "ssl_min_protocol_version=1",
    "keepalives=yes",
    "client_encoding=x",
    "options=-c%20timezon%3DUTC",
    "options=-c%20timezone%3Dx",
]

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(DOCUMENTS | st.just("\ud800") | st.just([float("nan"), float("-inf")]))
def test_documents_are_read_as_python_wrote_them(document):
    """To the last digit; also what is no JSON but in Python, and half a surrogate."""
    written = json.dumps(document)
    assert repr(_document(written)) == repr(json.loads(written))


@given(st.lists(st.text("\\u0\0x")))
def test_documents_are_written_without_zero_bytes(words):
    """And otherwise as they are, whatever backslashes stand before."""
    assert json.loads(_written(words)) == [word.replace("\0", "") for word in words]


class TestMigrations:
    def test_an_empty_database_is_filled(self, bare):
        """From nothing at all to the newest revision."""
        have, newest = revisions(open_current(bare))
        assert have == newest

    def test_models_equal_migrations(self, database):
        """Alembic finds nothing to add, drop or change between the migrated tables and the models."""
        with connect(database).connect() as connection:
            options = {"compare_type": True, "compare_server_default": True}
            assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []

    def test_upgrading_twice_changes_nothing(self, database):
        """An up-to-date database stays as it is."""
        before, after = upgrade(connect(database))
        assert before == after

    def test_two_who_fill_one_database_at_once_fill_it_once(self, bare):
        """The second waits for the first, and then finds nothing to do."""
        ended = []
        at_once(lambda _: ended.append(open_current(bare)), 4)
        assert {revisions(engine)[0] for engine in ended} == {revisions(ended[0])[1]}
        assert len(ended) == 4

    def test_a_new_file_that_another_writes_to_is_waited_for(self, tmp_path, monkeypatch):
        """SQLite itself says at once that it is locked, whatever the time-out, when it is to write ahead."""
        holder = sqlite3.connect(tmp_path / "new.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        waits = []
        clock = SimpleNamespace(
            monotonic=time.monotonic, sleep=lambda seconds: (waits.append(seconds), holder.rollback())
        )
        monkeypatch.setattr("tiertune_agent.history.database.time", clock)
        have, newest = revisions(open_current(f"sqlite:///{tmp_path}/new.sqlite"))
        holder.close()
        assert (have, len(waits)) == (newest, 1)

    def test_an_upgrade_that_fails_changes_nothing(self, bare, sql):
        """A table that is in the way stops it: what it had made before is gone again."""
        upgrade(connect(bare), "0001")
        sql(bare, "create table reviews (id integer)")
        with pytest.raises(DatabaseError, match="cannot be upgraded"):
            upgrade(connect(bare))
        assert revisions(connect(bare))[0] == "0001"
        sql(bare, "drop table reviews")
        assert upgrade(connect(bare))[0] == "0001"

    def test_an_older_database_is_not_opened_but_upgraded_on_command(self, database, sql):
        """A revision that is not the newest is refused with the command to run."""
        sql(database, "update alembic_version set version_num = '0000'")
        with pytest.raises(
            DatabaseError, match=r"0000, this version needs .*: run `tiertune db upgrade --config FILE`"
        ):
            open_current(database)

    def test_a_newer_database_is_refused(self, database, sql):
        """A revision that this version does not know cannot be upgraded, and the message says so, and what to run."""
        sql(database, "update alembic_version set version_num = '9999'")
        for use in (open_current, lambda url: upgrade(connect(url))):
            with pytest.raises(DatabaseError, match=r"revision 9999 is unknown .* run the TierTune that wrote it"):
                use(database)

    def test_who_waited_while_a_newer_version_upgraded_is_told(self, database, sql, monkeypatch):
        """By which revision is there by then."""
        newer = "update alembic_version set version_num = '9999'"
        monkeypatch.setattr("tiertune_agent.history.database._write_ahead", lambda _: sql(database, newer))
        with pytest.raises(DatabaseError, match=r"revision 9999 is unknown .* run the TierTune that wrote it"):
            upgrade(connect(database))

    def test_a_foreign_database_is_left_alone(self, bare, sql):
        """A database with somebody else's tables is not touched."""
        sql(bare, "create table orders (id integer)")
        with pytest.raises(DatabaseError, match="tables that are not TierTune's"):
            open_current(bare)

    @pytest.mark.parametrize("revision", ["0001", "0013", "4f2a9c1b7d3e"])
    def test_a_foreign_database_of_alembic_is_left_alone(self, bare, sql, revision):
        """Other programs number their schemas in a table of the same name, some of them as we do."""
        sql(bare, "create table orders (id integer)")
        sql(bare, "create table alembic_version (version_num varchar(32))")
        sql(bare, f"insert into alembic_version values ('{revision}')")
        for use in (open_current, lambda url: upgrade(connect(url))):
            with pytest.raises(UnusableError, match="tables that are not TierTune's"):
                use(bare)


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("nothing", "no address such as sqlite:///"),
            ("sqlite:////tmp/%00", "no address such as sqlite:///"),
            ("postgresql://ops%00@a/b", "no address such as sqlite:///"),
            ("postgresql://ops:secret@hidden@a/b", "an @ in a password is %40"),
            ("postgresql://ops:secret@hid/den@a/b", "an @ in a password is %40"),
            ("postgresql://ops:secret?@hidden@a/b", "an @ in a password is %40"),
            ("sqlite:////tmp/\udcff", "no address such as sqlite:///"),
            ("mysql://ops:hidden@a/b", "not in mysql://ops@a/b"),
            ("postgresql+asyncpg://a/b", "not in postgresql"),
            ("postgresql://a/b?password=hidden", "not in postgresql://a/b"),
            ("postgresql://a:99999/b", "a port is a number from 1 to 65535, not 99999"),
            ("postgresql://a:0/b", "a port is a number from 1 to 65535, not 0"),
            ("sqlite:////tmp/x?mode=ro", "no parameters, and none of its path a ?: sqlite:////tmp/x?..."),
            ("sqlite:////data/what?/tiertune.sqlite", "no parameters, and none of its path a ?: sqlite:////data/what?"),
            ("sqlite://", "not in sqlite://"),
            ("sqlite:///:memory:", "not in sqlite:///%3Amemory%3A"),
        ],
    )
    def test_an_address_of_no_database_is_refused(self, url, said):
        """And what it says of a password is not told."""
        with pytest.raises(UnusableError) as refused:
            connect(url)
        assert said in str(refused.value)
        assert "hidden" not in str(refused.value)

    @pytest.mark.parametrize(
        "url", ["postgresql://ops@site@a/b", "postgresql://ops@site:pw@a/b", "postgresql://ops@a/b?host=/run/x@y"]
    )
    def test_an_at_sign_elsewhere_is_no_password(self, url):
        """Users of some hosted databases have one."""
        assert connect(url).url.username.startswith("ops")

    def test_what_is_shown_has_no_password(self):
        """Nor parameters, which may name files of secrets."""
        assert shown("postgresql://u:secret@h:1/d?sslpassword=secret") == "postgresql://u@h:1/d"
        assert shown("sqlite:////var/lib/x.sqlite") == "sqlite:////var/lib/x.sqlite"


class TestFiles:
    def test_a_file_that_is_no_database_is_told(self, tmp_path):
        """A text file is refused with a message, not a traceback."""
        (tmp_path / "x.sqlite").write_text("no database at all, but long enough to be read as one" * 20)
        with pytest.raises(DatabaseError, match="cannot be opened"):
            open_current(f"sqlite:///{tmp_path}/x.sqlite")

    def test_a_place_that_can_be_no_database_says_what_to_mend(self, tmp_path):
        """A folder, and a file or nothing where a folder should be."""
        (tmp_path / "folder.sqlite").mkdir()
        (tmp_path / "file").write_text("")
        for name, told in (
            ("folder.sqlite", "folder.sqlite is a folder: name a file in it"),
            ("file/x.sqlite", "database: there is no folder .*/file: make it, or mend the path"),
            ("foldre.sqlite/x.sqlite", "database: there is no folder .*/foldre.sqlite: make it, or mend the path"),
        ):
            with pytest.raises(UnusableError, match=told):
                open_current(f"sqlite:///{tmp_path}/{name}")
        assert not (tmp_path / "foldre.sqlite").exists()

    @pytest.mark.parametrize("name", ["x.sqlite", ""])
    def test_what_may_not_be_written_is_refused(self, tmp_path, monkeypatch, name):
        """File or folder, by its name, to whoever would write: SQLite tells only when something is. It can be read."""
        url = f"sqlite:///{tmp_path}/x.sqlite"
        open_current(url).dispose()
        monkeypatch.setattr("os.access", lambda path, _: path != tmp_path / name)
        for use in (open_current, lambda url: upgrade(connect(url))):
            with pytest.raises(UnusableError, match=f"^database: {tmp_path / name} is readonly: let this user write"):
                use(url)
        have, newest = revisions(connect(url))
        assert have == newest

    def test_a_damaged_file_is_told(self, tmp_path):
        """In SQLite's own words."""
        open_current(f"sqlite:///{tmp_path}/damaged.sqlite").dispose()
        whole = (tmp_path / "damaged.sqlite").read_bytes()
        (tmp_path / "damaged.sqlite").write_bytes(whole[:100] + b"x" * (len(whole) - 100))
        with pytest.raises(UnusableError, match=r"damaged\.sqlite cannot be opened: .*malformed"):
            open_current(f"sqlite:///{tmp_path}/damaged.sqlite")

    def test_a_password_for_a_file_is_not_silently_left_out(self, tmp_path, upgrade):
        """Somebody who gives one believes that it protects something."""
        (tmp_path / "word").write_text("secret")
        wrong = upgrade(f"sqlite:///{tmp_path}/x", database_password_file=f"{tmp_path}/word")
        assert (wrong.returncode, "an SQLite file has no password" in wrong.stderr) == (2, True)
        assert not (tmp_path / "x").exists()

    def test_an_agent_on_such_a_place_ends_as_on_other_wrong_settings(self, tiertune, tmp_path):
        """One sentence, and status 2: what passes by itself ends with 1."""
        (tmp_path / "folder").mkdir()
        (tmp_path / "agent.yaml").write_text(
            "http: {port: 0}\ndatabase: sqlite:///folder\nstores: [{url: 'http://127.0.0.1:9'}]\n"
        )
        ended = tiertune("agent", "run", "--config", str(tmp_path / "agent.yaml"))
        assert (ended.returncode, ended.stderr) == (2, f"database: {tmp_path}/folder is a folder: name a file in it\n")

    def test_a_file_that_is_damaged_while_it_is_used_is_a_database_that_is_away(self, tmp_path):
        """As any other that cannot be used now: no traceback, and 503 for whoever asks."""
        path = tmp_path / "x.sqlite"
        history = History(open_current(f"sqlite:///{path}"))
        assert history.stores() == []
        history.close()
        path.write_bytes(path.read_bytes()[:4096] + b"x" * 100_000)
        with pytest.raises(DatabaseError, match="malformed"):
            history.journal.audit("ops", "", "x", {}, START)
        history.close()

    def test_a_file_that_is_only_looked_at_stays_as_it_is(self, tmp_path):
        """To the byte: an empty one becomes no database, and somebody else's keeps its journal."""
        empty, foreign = tmp_path / "empty", tmp_path / "foreign.sqlite"
        empty.touch()
        with sqlite3.connect(foreign) as other:
            other.execute("create table orders (id integer)")
        other.close()
        before = foreign.read_bytes()
        assert revisions(connect(f"sqlite:///{empty}"))[0] is None
        for use in (open_current, lambda url: upgrade(connect(url))):
            with pytest.raises(DatabaseError, match="tables that are not TierTune's"):
                use(f"sqlite:///{foreign}")
        assert (empty.read_bytes(), foreign.read_bytes()) == (b"", before)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "foreign.sqlite"]

    def test_readers_do_not_wait_for_a_writer(self, tmp_path):
        """A new file is written ahead, and so is one that lost it (a dump read in) once an agent opens it."""
        url, path = f"sqlite:///{tmp_path}/h.sqlite", tmp_path / "h.sqlite"
        for _ in range(2):
            open_current(url).dispose()
            with sqlite3.connect(path) as other:
                assert other.execute("pragma journal_mode").fetchone() == ("wal",)
                other.execute("pragma journal_mode=delete")
            other.close()

    def test_a_file_that_was_moved_away_is_not_written_to_nor_made_anew(self, tmp_path):
        """Back in its place it is used again, with all that it held."""
        path, away = tmp_path / "h.sqlite", tmp_path / "away.sqlite"
        history = History(open_current(f"sqlite:///{path}"))
        history.journal.audit("ops", "", "before", {}, START)
        path.rename(away)
        with pytest.raises(DatabaseError, match="is gone"):
            history.journal.audit("ops", "", "meanwhile", {}, START)
        assert not path.exists()
        away.rename(path)
        history.journal.audit("ops", "", "after", {}, START)
        assert [row["what"] for row in history.journal.audited()] == ["after", "before"]
        history.close()

    def test_a_locked_file_is_an_error_in_time(self, tmp_path):
        """Who waits for a writer gives up after some seconds, and the next write goes well."""
        history = History(open_current(f"sqlite:///{tmp_path}/h.sqlite"))
        with sqlite3.connect(tmp_path / "h.sqlite", isolation_level=None) as other:
            other.execute("begin exclusive")
            with pytest.raises(DatabaseError, match="database is locked"):
                history.journal.audit("ops", "", "meanwhile", {}, START)
            other.execute("rollback")
        history.journal.audit("ops", "", "after", {}, START)
        history.close()


@pytest.mark.real
class TestPasswords:
    def test_the_password_comes_from_a_file_and_may_be_replaced(self, postgres, tmp_path):
        """It is read at every connection; what cannot be read is told."""
        file, url = tmp_path / "password", postgres.url("empty", password=None)
        file.write_text("wrong\n")
        engine = connect(url, file)
        with pytest.raises(DatabaseError, match=r"cannot be opened: .*password authentication failed") as refused:
            revisions(engine)
        assert "wrong" not in str(refused.value)
        file.write_text(PASSWORD + "\n")
        have, newest = revisions(engine)
        assert have == newest
        engine.dispose()
        file.unlink()
        with pytest.raises(DatabaseError, match=r"password file .* cannot be read: No such file"):
            revisions(engine)
        file.symlink_to("/dev/null")
        with pytest.raises(DatabaseError, match=r"password file .* cannot be read: it is no regular file"):
            revisions(engine)

    def test_the_password_comes_from_pgpassfile(self, postgres, tmp_path, monkeypatch):
        """As for every client of PostgreSQL."""
        secret = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
        (tmp_path / "pgpass").write_text(f"127.0.0.1:{postgres.port}:*:*:{secret}\n")
        (tmp_path / "pgpass").chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
        engine = connect(postgres.url("empty", password=None))
        assert revisions(engine)[0]
        engine.dispose()

    def test_what_is_wrong_with_an_address_is_told(self, postgres):
        """In the words of PostgreSQL: a password, a parameter, a database, a server that does not answer."""
        for url, told in (
            (postgres.url("empty", password="wrong"), "password authentication failed"),
            *((postgres.url("empty") + f"?{wrong}", "cannot be opened: .") for wrong in WRONG_PARAMETERS),
            (postgres.url("nowhere"), '"nowhere" does not exist'),
            (postgres.url("empty").replace(str(postgres.port), str(free_port())), "refused"),
        ):
            with pytest.raises(DatabaseError, match=told):
                open_current(url)

    @pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
    def test_a_database_that_lacks_letters_is_refused(self, postgres, encoding):
        """As a cluster made without a locale has it: a later round would fail on a letter of a reason, or the first."""
        name = f"of_{encoding}".lower()
        postgres.command(f"create database {name} encoding '{encoding}' template template0 lc_collate 'C' lc_ctype 'C'")
        with pytest.raises(UnusableError, match=f"/{name} is encoded in {encoding}: give it one of CREATE DATABASE"):
            open_current(postgres.url(name))

    def test_one_that_was_filled_in_another_encoding_goes_on(self, postgres, monkeypatch):
        """As an agent before this one did: an upgrade of the agent ends no history that holds all its letters."""
        postgres.command("create database former encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'")
        with monkeypatch.context() as former:
            former.setattr("tiertune_agent.history.database._holds_all_letters", lambda _: None)
            open_current(postgres.url("former")).dispose()
        history = History(open_current(postgres.url("former")))
        history.journal.audit("J\u00fcrgen", "", "freeze", {}, START)
        assert [row["who"] for row in history.journal.audited()] == ["J\u00fcrgen"]
        history.close()

    def test_what_others_wrote_meanwhile_is_read_whatever_the_servers_default(self, postgres):
        """A stricter isolation would refuse whoever writes a row that changed since he began: a bypass, or a round."""
        postgres.command("create database strict template empty")
        postgres.command("alter database strict set default_transaction_isolation = 'repeatable read'")
        history, other = (History(open_current(postgres.url("strict"))) for _ in range(2))
        remember(history, store="host-a", tuning={"bypass": False})
        with history._session() as session:
            assert session.get(StoreRow, "host-a").pending_bypass is None
            other.wish_bypass({"host-a": "http://host-a:7410"}, on=True)
            session.execute(update(StoreRow).values(version="2"))
        assert history.store("host-a").pending_bypass
        for one in (history, other):
            one.close()

    def test_no_message_holds_the_password(self, upgrade, postgres):
        """Neither what is done nor what goes wrong tells it."""
        url = postgres.url("empty", password=PASSWORD)
        done = upgrade(url)
        away = upgrade(url.replace(str(postgres.port), str(free_port())))
        wrong = upgrade(postgres.url("empty", password="a secret that is wrong"))
        assert (done.returncode, away.returncode, wrong.returncode) == (0, 1, 1)
        assert done.stdout.startswith(f"postgresql://tiertune@127.0.0.1:{postgres.port}/empty: already")
        for ended in (done, away, wrong):
            assert "secret" not in ended.stdout + ended.stderr
