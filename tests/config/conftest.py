import pytest

from trainwright.config.lazy import allowlist as trust


@pytest.fixture(autouse=True)
def trust_as_at_the_start(monkeypatch):
    """What one test allows is not allowed in the next."""
    monkeypatch.setattr(trust, "_allowed_modules", set())
    for name in ("_code_folders", "_data_folders"):
        monkeypatch.setattr(trust, name, set())
    monkeypatch.setattr(trust, "_suggested", {})
