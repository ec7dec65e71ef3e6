"""What a model says about one input: a mapping whose entries can be read as attributes."""

from typing import Any

from trainwright.config.errors import did_you_mean


class ModelOutput(dict[str, Any]):
    """One result of ``post_process``.

    >>> out = ModelOutput(text="12A34")
    >>> out["text"], out.text
    ('12A34', '12A34')
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this output has no {name!r}. {did_you_mean(name, self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __repr__(self) -> str:
        return f"ModelOutput({', '.join(f'{name}={value!r}' for name, value in self.items())})"
