"""The position of a run in its epochs, and its rate."""

from fractions import Fraction

from trainwright.events.writers.rate import Position


def test_the_last_epoch_may_be_shorter() -> None:
    at = Position(230, 250, per_epoch=100)
    assert (at.epoch, at.num_epochs, at.of_epoch) == (3, 3, (30, 50))
    assert Position(100, 250, per_epoch=100).of_epoch == (100, 100)
    assert Position(7, 10).of_epoch == (7, 10)


def test_an_iteration_belongs_to_the_epoch_of_its_first_sample() -> None:
    samples, batch, epochs = 1437, 32, 40
    total = -(-samples * epochs // batch)
    for done in (1, 44, 45, 46, 89, 90, 1752, 1753, total):
        at = Position(done, total, per_epoch=Fraction(samples, batch))
        first_sample = (done - 1) * batch
        assert at.epoch == first_sample // samples + 1
        before = sum(n * batch // samples < at.epoch - 1 for n in range(total))
        assert at.of_epoch == (done - before, sum(n * batch // samples == at.epoch - 1 for n in range(total)))
        assert at.num_epochs == epochs
