"""Reading by dotted key."""

from omegaconf import OmegaConf

from trainwright.config import try_get_key


def test_the_first_key_that_exists_wins_and_none_is_a_value():
    for cfg in ({"a": {"b": [1, {"c": 2}], "n": None}}, OmegaConf.create({"a": {"b": [1, {"c": 2}], "n": None}})):
        assert try_get_key(cfg, "x", "a.x", "a.b.1.c") == 2
        assert try_get_key(cfg, "a.n", default=3) is None
        assert try_get_key(cfg, "a.b.7", "a.n.x", "a.b.c.d", default=3) == 3
        assert try_get_key(cfg, "x") is None
