"""Secrets: passwords, keys and tokens, recognized by the name of their key, by environment variables, or by a prefix.

In a saved configuration a secret is ``???``, in a log line ``[redacted]``. The configuration in memory never changes.
The time is proportional to the length of a text: a run of characters is matched once, from its beginning (``++``).
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainwright.base.terminal import MAX_ERROR, printable, shortened

logger = logging.getLogger("trainwright.config")

MISSING = "???"  # omegaconf's marker of a required value
REDACTED = "[redacted]"
_MIN_LENGTH = 8  # characters; a shorter value of the environment could be an ordinary word
_MIN_WORD = 6  # ... as could a shorter one of a configuration, which is only redacted as a complete word

# Names are compared as lower-case words joined by "_": "hubToken" is hub_token.
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_NAME = re.compile(
    r"""(?x)
    (.*_)? ([a-z]*(password|passwd|passphrase|credential) | secret)s? (_.*)?
    | (.*_)? (access|account|api|auth|aws|client|crypt|deploy|encryption|private|secret|service|signing|ssh|storage)
             _key(s|_id)?
    | (.*_)? (access|api|auth|bearer|bot|ci|deploy|gh|github|gitlab|hf|hub|huggingface|id|jwt|login|npm|oauth|personal
             |pypi|refresh|secret|security|session|slack|wandb) _tokens?
    | token | (.*_)? (api|auth)token | (.*_)? (apikeys?|accesskey|privatekey) | .+_pwd
    """
)
# A name with this ending describes a secret, such as its path or length.
_ABOUT_SECRET = re.compile(
    r"""(?x)
    .*_(count|dim|dir|env|field|file|folder|format|host|(?<!_key_)id|len|length|loss|name|num|path|port|prompt|ratio
       |required|size|store|type|uri|url|variable|weight)
    """
)
_FORMS = re.compile(
    r"""(?x)
    \bhf_[A-Za-z0-9]{16,}                                              # Hugging Face
    | \bsk-[\w-]{16,}                                                  # OpenAI, Anthropic and others
    | \bgh[opsur]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,} | \bglpat-[\w-]{16,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,} | \bAIza[\w-]{30,}                  # Amazon, Google
    | \bxox[abeoprs]-[\w-]{8,}                                         # Slack
    | (?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+(?:\.[\w-]*+)?                # JSON web tokens
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----(?:.*?-----END[ A-Z]*PRIVATE\ KEY-----|.*)
    | (?:(?<=://)|(?<=[a-z0-9]:/))[^\s/:@]*:[^\s/@]+(?=@)              # user:password of a URL, also of one as a path
    | (?<=[Bb]earer\ )[\w.~+/=-]{16,}
    """,
    re.DOTALL,
)
# name=value and 'name': 'value'. Not `name: value`, which is also how a message begins: "optim.token: no such key".
_PAIR = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]++)(?P<between>["']?\s*=\s*|["']?\s*:\s*(?=["']))"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<plain>[^\s"',;)}\]]+))"""
)
# Each secret name and match of _PAIR, and each of _FORMS, contains one of these: searching them first is faster.
_HINTS = re.compile(r"(?i:pass|secret|token|key|credential|pwd)")
_MARKS = re.compile(r"hf_|sk-|gh[opsur]_|github_pat_|glpat-|AKIA|ASIA|AIza|xox|eyJ|-----BEGIN|:/|earer ")
_INDEX = re.compile(r"(?i)tokens?(\.\d+)*$")  # the path of a number that is a token's index in a vocabulary
_NO_SECRET = re.compile(r"[<\[].*[>\]]|\$\{.*\}|[\d.]*|(?i:none|null|true|false|\?\?\?)")

_HOLDING = (Mapping, list, tuple, str, bytes)  # types that may hold a secret under an ordinary name

_of_configs: set[str] = set()  # values under secret names in the configurations of this process


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str, *, environment: bool = False) -> bool:
    """Whether a key of this name contains a secret.

    Args:
        environment: it is the name of an environment variable: every ``…_TOKEN`` is a secret.

    >>> [is_secret_name(name) for name in ("api_key", "hub_token", "dbPassword", "token")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("pad_token", "max_tokens", "tokenizer", "key", "monkey", "password_file")]
    [False, False, False, False, False, False]
    """
    words = "_".join(_PART.findall(name)).lower()
    if _ABOUT_SECRET.fullmatch(words):
        return False
    return bool(_SECRET_NAME.fullmatch(words)) or (environment and words.endswith("_token"))


def redact(text: str) -> str:
    """``text`` with ``[redacted]`` in place of secrets."""
    text = _redact_by_form(text, _of_environment())
    for value in sorted(_of_configs, key=len, reverse=True):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", REDACTED, text)
    return text


def redact_command(arguments: Iterable[str]) -> list[str]:
    """The arguments of a command without secrets, also those that follow the name of an option.

    >>> redact_command(["train.py", "--api-key", "a1b2", "--epochs", "3", "--password=c3d4"])
    ['train.py', '--api-key', '[redacted]', '--epochs', '3', '--password=[redacted]']
    """
    found: list[str] = []
    follows = False
    for one in arguments:
        found.append(REDACTED if follows and not one.startswith("-") else redact(one))
        follows = one.startswith("-") and "=" not in one and is_secret_name(one.lstrip("-"))
    return found


def safe_trackers(trackers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The arguments of trackers. W&B sends the command line with the facts of the machine: not if it has a secret."""
    if not trackers or "wandb" not in trackers or redact_command(sys.argv) == sys.argv:
        return trackers
    return {**trackers, "wandb": {"settings": {"x_disable_meta": True}, **trackers["wandb"]}}


def without_secrets(tree: Any) -> tuple[Any, list[str]]:
    """Plain dicts, lists and values with ``???`` in place of secrets, and the keys of these.

    The values are remembered: log lines of this process do not contain them either.
    """
    hidden, environment = list[str](), _of_environment()

    def masked(value: Any, path: str = "", is_secret: bool = False) -> Any:
        """``is_secret``: the name of the key, or of a key above it, is that of a secret."""
        if isinstance(value, list | tuple):
            return [masked(child, f"{path}.{index}", is_secret) for index, child in enumerate(value)]
        if not isinstance(value, Mapping):
            if not _is_secret(value, path, is_secret, environment):
                return value
            hidden.append(path)
            return MISSING
        # The arguments of a call under a secret name describe how to get the secret: each is checked by its own name.
        below, found = is_secret and "_target_" not in value, dict[Any, Any]()
        for key, child in value.items():
            name = str(key)
            # A list of ``tokens`` is secret; text under this name is that of a column.
            named = _HINTS.search(name) and (
                is_secret_name(name) or (name.lower() == "tokens" and not isinstance(child, str))
            )
            if below or named or isinstance(child, _HOLDING):
                child = masked(child, f"{path}.{name}" if path else name, bool(below or named))
            found[key] = child
        return found

    return masked(tree), hidden


def remember_secrets(config: Any) -> None:
    """Redact the secrets of a configuration in log lines from now on."""
    if hasattr(type(config), "to_dict"):
        without_secrets(config.to_dict())
        return
    from omegaconf import DictConfig, OmegaConf

    if isinstance(config, DictConfig):
        without_secrets(OmegaConf.to_container(config, resolve=False))


def warn_of_hidden(hidden: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Log once per folder the keys that :func:`without_secrets` replaced in a file there."""
    keys = ", ".join(hidden)
    if keys:
        _warn(keys, str(Path(path).resolve().parent))


@functools.cache  # a run writes its configuration twice, before and after it is completed
def _warn(keys: str, folder: str) -> None:
    logger.warning(
        "%s: the saved configuration has %r for each value that looks secret: %s. A run that starts from it needs"
        " these values: as key=value on the command line, or from a Python configuration that reads them from"
        " environment variables.",
        folder,
        MISSING,
        keys,
    )


def with_short_errors(text: str, error: object) -> str:
    """``text``, with which an error is reported, with the error's own text shortened, and those of its causes."""
    seen = set[int]()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        if len(own := str(error)) > MAX_ERROR:
            text = text.replace(own, shortened(redact(own)))
        error = error.__cause__ or error.__context__
    return text


class RedactingFormatter(logging.Formatter):
    """A formatter that redacts the complete line, with its arguments and exception, and escapes control characters.

    It is not a filter, because a filter would change the record for the handlers of the user's program, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for error in (*(record.args if isinstance(record.args, tuple) else ()), record.exc_info and record.exc_info[1]):
            text = with_short_errors(text, error)
        return printable(redact(text))


def _is_secret(value: Any, path: str, is_secret: bool, environment: list[str]) -> bool:
    if type(value) in (int, float):  # a password of digits
        return is_secret and not _INDEX.search(path)
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    if not isinstance(text, str) or not text:
        return False
    if is_secret and not _NO_SECRET.fullmatch(text) and not os.path.isfile(text):
        if len(text) >= _MIN_WORD:
            _of_configs.add(text)
        return True
    return _redact_by_form(text, environment) != text


def _redact_by_form(text: str, environment: list[str]) -> str:
    """Without the values of environment variables, ``name=value`` of secret names, and the known forms of secrets."""
    for value in environment:
        text = text.replace(value, REDACTED)
    if _HINTS.search(text):
        text = _PAIR.sub(_redact_pair, text)
    return _FORMS.sub(_redact_form, text) if _MARKS.search(text) else text


def _redact_form(match: re.Match[str]) -> str:
    is_words = match[0].startswith("sk-") and match[0].islower() and not any(map(str.isdigit, match[0]))
    return match[0] if is_words else REDACTED  # sk-learn-pipelines


def _redact_pair(match: re.Match[str]) -> str:
    name, quote, value = match["name"].rpartition(".")[2], match["quote"] or "", match["quoted"] or match["plain"] or ""
    if not is_secret_name(name) or _NO_SECRET.fullmatch(value):
        return match[0]
    return f"{match['name']}{match['between']}{quote}{REDACTED}{quote}"


def _of_environment() -> list[str]:
    """The values of environment variables with secret names, the longest first: one may be a part of another."""
    names = [name for name in os.environ if _HINTS.search(name) and is_secret_name(name, environment=True)]
    values = {os.environ[name] for name in names}
    return sorted((v for v in values if len(v) >= _MIN_LENGTH and not os.path.exists(v)), key=len, reverse=True)
