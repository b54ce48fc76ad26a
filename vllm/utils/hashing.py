"""Hash functions for prefix-cache keys: content in, bytes out."""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import cbor2
import xxhash

HashFn = Callable[[Any], bytes]


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def sha256(input: Any) -> bytes:
    """SHA-256 over the pickle of the value: 32 bytes."""
    return hashlib.sha256(_pickled(input)).digest()


def sha256_cbor(input: Any) -> bytes:
    """SHA-256 over canonical CBOR: 32 bytes, equal in every process and language."""
    return hashlib.sha256(_cbor(input)).digest()


def xxhash_pickled(input: Any) -> bytes:
    """XXH3-128 over the pickle of the value: 16 bytes, not collision resistant."""
    return xxhash.xxh3_128_digest(_pickled(input))


def xxhash_cbor(input: Any) -> bytes:
    """XXH3-128 over canonical CBOR: 16 bytes, not collision resistant."""
    return xxhash.xxh3_128_digest(_cbor(input))


_HASH_FNS: dict[str, HashFn] = {
    "sha256": sha256,
    "sha256_cbor": sha256_cbor,
    "xxhash": xxhash_pickled,
    "xxhash_cbor": xxhash_cbor,
}


def get_hash_fn_by_name(hash_fn_name: str) -> HashFn:
    """The function of a `--prefix-caching-hash-algo` name; ValueError otherwise."""
    if hash_fn_name not in _HASH_FNS:
        raise ValueError(
            f"unknown hash function {hash_fn_name!r}: expected one of "
            f"{', '.join(_HASH_FNS)}"
        )
    return _HASH_FNS[hash_fn_name]
