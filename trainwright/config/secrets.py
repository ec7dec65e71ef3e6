"""What looks secret: passwords, keys and tokens, by the name of their key, by their form, or from the environment.

It is not written into a saved configuration (there it is ``???``) nor into a log line (``[redacted]``). The
configuration in memory is never changed.
"""

import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.terminal import printable

logger = logging.getLogger("trainwright.config")

MISSING = "???"  # omegaconf's mark of a value that must be given
REDACTED = "[redacted]"
_MIN_LENGTH = 8  # characters; a shorter value of the environment is too likely to be a word of the text
_MIN_WORD = 6  # ... and a shorter one of a configuration too, which is only looked for as a whole word

# Words of a key, split at "_", "-", "." and capitals. One of the first kind is enough.
_SECRET_WORDS = re.compile(r"(\w*(password|passwd|passphrase|credential)|secret)s?")
# What stands before "key" and before "token" where these are secret.
_KEY_WORDS = "access account api auth aws client crypt deploy encryption private secret service signing ssh storage"
_TOKEN_WORDS = """
    access api auth bearer bot ci deploy gh github gitlab hf hub huggingface id jwt login npm oauth personal pypi
    refresh secret security session slack wandb
"""
# A key that ends so says where a secret is, or how long, and is none.
_ABOUT_WORDS = """
    count dim dir env field file folder format host id length len loss name num path port prompt ratio required size
    store type uri url variable weight
"""
_KEYS, _TOKENS, _ABOUT_SECRETS = _KEY_WORDS.split(), _TOKEN_WORDS.split(), _ABOUT_WORDS.split()
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_FORMS = re.compile(
    r"""(?x)
    \bhf_[A-Za-z0-9]{16,}                                              # Hugging Face
    | \bsk-(?=[\w-]*[A-Z0-9])[\w-]{16,}                                # OpenAI, Anthropic and others
    | \bgh[opsur]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,} | \bglpat-[\w-]{16,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,} | \bAIza[\w-]{30,}                  # Amazon, Google
    | \bxox[abeoprs]-[\w-]{8,}                                         # Slack
    | \beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?                           # JSON web tokens
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----(?:.*?-----END[ A-Z]*PRIVATE\ KEY-----|.*)
    | (?<=://)[^\s/:@]*:[^\s/@]+(?=@)                                  # user:password of a URL
    | (?<=[a-z0-9]:/)[^\s/:@]*:[^\s/@]+(?=@)                            # ... of one that went through a path
    | (?<=[Bb]earer\ )[\w.~+/=-]{16,}
    """,
    re.DOTALL,
)
# One of these is in whatever _FORMS finds. Looking for them first takes a twentieth of its time.
_MARKS = (
    "hf_",
    "sk-",
    *(f"gh{kind}_" for kind in "opsur"),  # in full: "throughput" is in every line of a training
    "github_pat_",
    "glpat-",
    "AKIA",
    "ASIA",
    "AIza",
    "xox",
    "eyJ",
    "-----BEGIN",
    ":/",
    "earer ",
)
# name=value and 'name': 'value'. Not `name: value`, which is also how a message begins: "optim.token: no such key".
_PAIR = re.compile(
    r"""(?P<name>[A-Za-z][\w.-]*)(?P<between>["']?\s*=\s*|["']?\s*:\s*(?=["']))"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<plain>[^\s"',;)}\]]+))"""
)
_HINTS = ("pass", "secret", "token", "key", "credential", "pwd")  # one is in the name of every pair of interest
_INDEX = re.compile(r"(?i)tokens?(\.\d+)*$")  # the path of a number that is a token's place in a vocabulary
_NO_SECRET = re.compile(r"[<\[].*[>\]]|\$\{.*\}|[\d.]*|(?i:none|null|true|false|\?\?\?)")

_of_configs: set[str] = set()  # values that saved configurations had under secret-looking keys


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str, *, environment: bool = False) -> bool:
    """Whether a key of this name holds a secret.

    Args:
        environment: the name is a variable's, where every ``…_TOKEN`` is one and no ``pad_token`` is expected.

    >>> [is_secret_name(name) for name in ("api_key", "hub_token", "dbPassword", "token")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("pad_token", "max_tokens", "tokenizer", "key", "monkey", "password_file")]
    [False, False, False, False, False, False]
    """
    words = [part.lower() for part in _PART.findall(name)]
    if not words or (words[-1] in _ABOUT_SECRETS and words[-2:] != ["key", "id"]):
        return False
    if any(_SECRET_WORDS.fullmatch(word) for word in words):
        return True
    *before, last = words[:-1] if words[-1] == "id" else words
    if last in ("token", "apitoken", "authtoken"):
        return not before or environment or before[-1] in _TOKENS or last != "token"
    if last in ("tokens", "key", "keys"):
        return bool(before) and before[-1] in (_TOKENS if last == "tokens" else _KEYS)
    return last in ("apikey", "apikeys", "accesskey", "privatekey") or (last == "pwd" and bool(before))


def redact(text: str) -> str:
    """``text`` with what looks secret in it replaced by ``[redacted]``."""
    text = _redact_by_form(text, _of_environment())
    for value in sorted(_of_configs, key=len, reverse=True):
        if value in text:
            text = _whole_word(value).sub(REDACTED, text)
    return text


def without_secrets(tree: Any) -> tuple[Any, list[str]]:
    """Plain dicts, lists and values with ``???`` where a value looks secret, and the keys of these.

    The values are remembered, so that log lines of this process do without them too.
    """
    environment = _of_environment()
    _masked(tree, "", False, _Pass(environment))  # a first time for what it remembers: a value may stand under two keys
    second = _Pass(environment)
    return _masked(tree, "", False, second), second.hidden


def remember_secrets(config: Any) -> None:
    """Keep what looks secret in a configuration out of the log lines from now on."""
    if hasattr(type(config), "to_dict"):
        without_secrets(config.to_dict())
        return
    from omegaconf import DictConfig, OmegaConf

    if isinstance(config, DictConfig):
        without_secrets(OmegaConf.to_container(config, resolve=False))


def warn_of_hidden(hidden: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Say once for each folder what :func:`without_secrets` has kept out of a file there."""
    keys = ", ".join(hidden)
    if keys:
        _warn(keys, str(Path(path).resolve().parent))


@functools.cache  # a run writes its configuration twice, before and after it is put together
def _warn(keys: str, folder: str) -> None:
    logger.warning(
        "%s: the configuration that is saved here has %r for what looks secret: %s. A run that is started from it needs"
        " them again: as key=value on the command line, or from a Python configuration that reads them from environment"
        " variables.",
        folder,
        MISSING,
        keys,
    )


class RedactingFormatter(logging.Formatter):
    """A formatter that redacts the finished line, with its arguments, exception and stack, and escapes what a terminal
    would take for a command.

    A formatter rather than a filter of the handler: a filter would have to change the record, which belongs to the
    handlers of the user's program too.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One way through a tree: the keys of what is kept out, and the secrets of the environment, looked up once."""

    environment: list[str]
    hidden: list[str] = field(default_factory=list)


def _masked(value: Any, path: str, is_secret: bool, found: _Pass) -> Any:
    if isinstance(value, Mapping):
        # A node that is called with a secret's name says how to get it: its arguments are judged by themselves.
        below = is_secret and "_target_" not in value
        return {
            _masked_key(key, path, found): _masked(
                child, f"{path}.{key}" if path else str(key), below or _holds_secrets(str(key), child), found
            )
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(child, f"{path}.{index}", is_secret, found) for index, child in enumerate(value)]
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    if is_secret and type(value) in (int, float) and not _INDEX.search(path):  # a password of digits
        found.hidden.append(path)
        return MISSING
    if not isinstance(text, str) or not text:
        return value
    is_named_secret = is_secret and not _NO_SECRET.fullmatch(text) and not os.path.isfile(text)
    if is_named_secret and len(text) >= _MIN_WORD:
        _of_configs.add(text)
    if not (is_named_secret or _is_secret_text(text, found.environment)):
        return value
    found.hidden.append(path)
    return MISSING


def _holds_secrets(name: str, value: Any) -> bool:
    """Whether ``value`` is secret under the key ``name``: a list of ``tokens``, though the word alone is a column's."""
    return is_secret_name(name) or (name.lower() == "tokens" and not isinstance(value, str))


def _masked_key(key: Any, path: str, found: _Pass) -> Any:
    if isinstance(key, str) and _is_secret_text(key, found.environment):
        found.hidden.append(f"a key of {path or 'the configuration'}")
        return REDACTED
    return key


def _is_secret_text(text: str, environment: Iterable[str]) -> bool:
    if _redact_by_form(text, environment) != text:
        return True
    # Of the secrets known by name only those that no other setting has by chance: a password may be "training".
    return any(
        value in text and len(value) >= _MIN_LENGTH and not value.isalpha() and _whole_word(value).search(text)
        for value in tuple(_of_configs)
    )


def _redact_by_form(text: str, environment: Iterable[str]) -> str:
    for value in environment:
        text = text.replace(value, REDACTED)
    folded = text.casefold()
    if any(hint in folded for hint in _HINTS):
        text = _PAIR.sub(_redact_pair, text)
    if any(mark in text for mark in _MARKS):
        text = _FORMS.sub(REDACTED, text)
    return text


def _whole_word(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")


def _redact_pair(match: re.Match[str]) -> str:
    name, quote, value = match["name"].rpartition(".")[2], match["quote"] or "", match["quoted"] or match["plain"] or ""
    if not is_secret_name(name) or _NO_SECRET.fullmatch(value):
        return match[0]
    return f"{match['name']}{match['between']}{quote}{REDACTED}{quote}"


def _of_environment() -> list[str]:
    """The values of secret-looking variables, the longest first: one may be a part of another."""
    names = [name for name in os.environ if is_secret_name(name, environment=True)]
    values = {os.environ.get(name, "") for name in names}
    there = [value for value in values if len(value) >= _MIN_LENGTH and not os.path.exists(value)]
    return sorted(there, key=len, reverse=True)
