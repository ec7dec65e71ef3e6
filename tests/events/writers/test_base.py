import logging

import pytest

from trainwright.events import EventStorage, EventWriter, JSONWriter, SafeWriter


class Broken(EventWriter):
    def __init__(self):
        self.calls = 0

    def write(self, storage=None):
        self.calls += 1
        raise ConnectionError("the tracker is down")

    def close(self):
        raise ConnectionError("still down")

    def __repr__(self):
        return "Broken()"


def test_a_writer_that_fails_is_switched_off_with_one_message_and_others_lose_nothing(tmp_path, caplog):
    broken = Broken()
    writers = [SafeWriter(broken), SafeWriter(JSONWriter(tmp_path / "metrics.json"))]
    with EventStorage() as storage, caplog.at_level(logging.ERROR):
        for _ in range(5):
            storage.put_scalar("loss", 1.0)
            for writer in writers:
                writer.write()
            storage.step()
        for writer in writers:
            writer.close()
    assert broken.calls == 1
    assert len((tmp_path / "metrics.json").read_text().splitlines()) == 5
    (record,) = caplog.records
    assert "Broken() failed and is disabled" in record.getMessage()
    assert "the tracker is down" in record.getMessage()


def test_a_users_writer_without_a_storage_argument_works():
    class Old(EventWriter):
        seen = ()

        def write(self):
            self.seen += ("write",)

    old = Old()
    SafeWriter(old).write()
    assert old.seen == ("write",)


def test_a_writer_without_write_is_an_error():
    with pytest.raises(NotImplementedError, match="EventWriter must define write"):
        EventWriter().write()
