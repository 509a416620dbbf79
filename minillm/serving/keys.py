"""Keys: who asks, and how much a minute. Built in chapter 23.

A key file is TOML:

    [[keys]]
    key = "sk-…"
    user = "ann"                  # the name that the policy "fair" shares steps between; "" by default
    priority = 0                  # the lowest number its requests may have: 0 comes before 1
    requests_per_minute = 60      # no limit by default
    tokens_per_minute = 20000     # prompts and answers together
    admin = true                  # may load and unload models; false by default
"""

from __future__ import annotations

import hashlib
import hmac
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from minillm.serving.errors import ApiError


@dataclass(frozen=True)
class Key:
    """What one client may do. `value` is the secret; it is in no `repr`, and so in no log."""

    value: str = field(repr=False)
    user: str = ""
    priority: int = 0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    admin: bool = False

    def __post_init__(self):
        if not isinstance(self.value, str) or not self.value.strip():
            raise ValueError("a key is empty; allowed: a string of at least one character")
        if self.value != self.value.strip() or not self.value.isascii():
            raise ValueError("a key has white space at an end, or a character outside of ASCII: no header carries that")
        if not isinstance(self.user, str):
            raise ValueError(f"user={self.user!r} of a key is not allowed; allowed: a string")
        if type(self.priority) is not int:
            raise ValueError(f"priority={self.priority!r} of a key is not allowed; allowed: a whole number")
        if type(self.admin) is not bool:
            raise ValueError(f"admin={self.admin!r} of a key is not allowed; allowed: true or false")
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not value > 0):
                raise ValueError(f"{name}={value!r} of a key is not allowed; allowed: over 0, or no limit")


def read_key_file(path: str | Path) -> tuple[Key, ...]:
    """The keys of a TOML file. Raises ValueError naming the file and what is wrong, never a key."""
    path = Path(path).expanduser()
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("keys")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"the key file {path} cannot be read: {type(error).__name__}") from None
    names = {"key": "value"} | {one.name: one.name for one in fields(Key) if one.name != "value"}
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f'the key file {path} has no [[keys]]; each needs a line: key = "..."')
    keys = []
    for number, entry in enumerate(entries, 1):
        if unknown := sorted(entry.keys() - names.keys()):
            raise ValueError(
                f"the key file {path}, entry {number}: unknown {unknown[0]!r}; allowed: {', '.join(names)}"
            )
        if "key" not in entry:
            raise ValueError(f"the key file {path}, entry {number} has no key")
        try:
            keys.append(Key(**{names[name]: value for name, value in entry.items()}))
        except ValueError as error:
            raise ValueError(f"the key file {path}, entry {number}: {error}") from None
    return tuple(keys)


class Bucket:
    """A token bucket: `rate` a minute, of which up to a minute's worth is saved up. Taking more than there is leaves a
    debt, which has to be paid before the next request: so a limit on tokens can be held without knowing the length of
    an answer beforehand."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self.clock = rate, clock
        self.level, self.filled = rate, clock()

    def seconds_until(self, amount: float = 1.0) -> float:
        """0 where `amount`, or a whole minute's worth, is there."""
        now = self.clock()
        self.level = min(self.rate, self.level + (now - self.filled) * self.rate / 60)
        self.filled = now
        return max(0.0, (min(amount, self.rate) - self.level) * 60 / self.rate)

    def take(self, amount: float) -> None:
        """What is given back is a negative amount."""
        self.seconds_until()
        self.level -= amount


class Client:
    """One key with what it has used, or everyone where there are no keys."""

    def __init__(self, key: Key | None, clock: Callable[[], float] = time.monotonic):
        self.user, self.priority = (key.user, key.priority) if key else ("", 0)
        self.is_known = key is not None
        self.is_admin = key is None or key.admin
        self.requests = Bucket(key.requests_per_minute, clock) if key and key.requests_per_minute else None
        self.tokens = Bucket(key.tokens_per_minute, clock) if key and key.tokens_per_minute else None

    def check_rate(self) -> None:
        """Count a request. Raises ApiError 429 where the key has used up its minute."""
        for name, bucket, least in (("requests", self.requests, 1.0), ("tokens", self.tokens, 1.0)):
            if bucket is not None and (seconds := bucket.seconds_until(least)) > 0:
                raise ApiError(
                    429,
                    f"this key may use {bucket.rate:g} {name} a minute, and has; try again in {seconds:.0f} s",
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )
        if self.requests is not None:
            self.requests.take(1)

    def check_admin(self) -> None:
        """Raise ApiError 403 for a key that may not change what is served."""
        if not self.is_admin:
            raise ApiError(
                403,
                "this key may not change what is served; use one that the key file gives admin = true",
                code="not_an_admin",
            )

    def count_tokens(self, amount: int) -> None:
        """Prompts when they are admitted, answers when they have ended."""
        if self.tokens is not None:
            self.tokens.take(amount)


class Clients:
    """Tells who asks by the header `Authorization: Bearer KEY`."""

    def __init__(self, keys: Sequence[Key], clock: Callable[[], float] = time.monotonic):
        self.anyone = None if keys else Client(None, clock)
        self._known = [(_digest(key.value), Client(key, clock)) for key in keys]

    def find(self, authorization: str | None) -> Client:
        """Raises ApiError 401. Every key is compared, each in the same time: how long it takes tells nothing."""
        if self.anyone is not None:
            return self.anyone
        kind, _, value = (authorization or "").partition(" ")
        digest, found = _digest(value.strip()), None
        for known, client in self._known:
            if hmac.compare_digest(known, digest):
                found = client
        if found is None or kind.lower() != "bearer":
            why = "was not recognised" if authorization else "is missing"
            raise ApiError(
                401,
                f"the API key {why}; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                kind="authentication_error",
            )
        return found


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()
