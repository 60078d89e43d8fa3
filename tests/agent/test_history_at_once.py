"""What the round and operators write to history at the same time: neither undoes the other's, nor is turned away."""

from sqlalchemy import event

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import after, remember

def test_what_a_store_answers_meanwhile_stays_when_a_bypass_is_acknowledged(history):
    """A round writes the store's newer tuning just before the acknowledgement is written."""
    remember(history, tuning={"version": 1, "bypass": False})
    history.wish_bypass("host-a", on=True)
    met = []

    def meanwhile(*told):
        if told[2].startswith("UPDATE stores") and not met:
            met.append(told)
            remember(history, tuning={"version": 2, "bypass": False}, at=after(seconds=15))

    event.listen(history._engine, "before_cursor_execute", meanwhile)
    history.acknowledge_bypass("host-a", on=True)
    store = history.store("host-a")
    assert met
    assert (store.tuning, store.pending_bypass) == ({"version": 2, "bypass": True}, None)
