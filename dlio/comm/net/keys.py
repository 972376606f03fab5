"""Keys of a job's ranks, and the greeting by which two of them prove to each other who they are.

Each rank publishes a value of a Diffie-Hellman exchange (group 14 of RFC 3526); from the other's
value it has a key with each other rank, which nobody can compute who only reads along. Where the
launcher gave the ranks a secret (DLIO_SECRET), the key depends on it, too: then nobody can put
values of his own in their place, either.

    caller -> answerer   HELLO: magic, version, from, to, nonce a, proof(key, all before)
    caller <- answerer   nonce b, proof(key, HELLO, nonce b)
    caller -> answerer   proof(key, HELLO, nonce b, "confirm")

Both nonces are new for each connection, so a recorded greeting proves nothing. Keys of the
connection, one for each direction, follow from the ranks' key and both nonces.
"""

import hmac
import os
import re
import secrets
import struct
from collections.abc import Sequence
from typing import Final

from dlio.errors import CommError
from dlio.util.settings import SECRET
from dlio.util.units import counted

_PRIME: Final = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_BASE: Final = 2
_VALUE_BYTES: Final = 256
_EXPONENT_BITS: Final = 256
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 16
_NAMES: Final = struct.Struct("<4sHHII")
_MAGIC: Final = b"dlio"
_VERSION: Final = 2
_HELLO_BYTES: Final = _NAMES.size + _NONCE_BYTES
_DIGITS: Final = re.compile("[0-9a-f]{1,512}")
_HASH: Final = "sha256"


class RefusedConnection(CommError):
    """The other side of a connection did not prove who it is, or broke the protocol."""


def job_secret() -> bytes:
    """Return the secret that the launcher gave to all ranks; empty if it gave none."""
    return os.environ.get(SECRET, "").encode()


class Keys:
    """One rank's keys with all others. They share the secret with nobody else; it may be empty."""

    def __init__(self, rank: int, secret: bytes = b"") -> None:
        self.rank = rank
        self._secret = secret
        self._exponent = secrets.randbits(_EXPONENT_BITS) | 1 << (_EXPONENT_BITS - 1)
        self._values: list[int] = []
        self._keys: dict[int, bytes] = {}

    def public(self) -> str:
        """Return the value to publish."""
        return f"{pow(_BASE, self._exponent, _PRIME):x}"

    def meet(self, values: Sequence[str]) -> None:
        """Take the published values of all ranks. Raises CommError for an invalid one."""
        for rank, text in enumerate(values):
            value = int(text, 16) if _DIGITS.fullmatch(text) else 0
            # 0, 1 and p - 1 would make the shared value known to everybody.
            if not 1 < value < _PRIME - 1:
                raise CommError(f"rank {rank} published an invalid key: is it a rank of this job?")
            self._values.append(value)

    def key(self, peer: int) -> bytes:
        """Return the key with a rank. Raises RefusedConnection for an unknown rank."""
        if not 0 <= peer < len(self._values):
            raise RefusedConnection(
                f"this job has {counted(len(self._values), 'rank')}, and none is number {peer}"
            )
        if peer not in self._keys:
            # Both sides mix in the same words in the same order, and the numbers of both ranks: a
            # key of one pair is of no use with another.
            low, high = sorted((peer, self.rank))
            shared = pow(self._values[peer], self._exponent, _PRIME)
            pair = b"".join(
                value.to_bytes(_VALUE_BYTES, "little")
                for value in (low, high, self._values[low], self._values[high], shared)
            )
            self._keys[peer] = hmac.digest(self._secret, b"dlio ranks" + pair, _HASH)
        return self._keys[peer]


class _Greeting:
    """One side of a greeting: `feed` takes all bytes of the other side, one message at a time."""

    wants: int
    """Bytes of the next message of the other side; 0 once it has proved who it is."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.peer = -1
        self._key = b""
        self._hello = self._nonce = b""

    def session(self) -> tuple[bytes, bytes]:
        """Return the keys of the caller's and of the answerer's frames."""
        base = hmac.digest(self._key, b"session" + self._hello + self._nonce, _HASH)
        # Two keys: with one, a frame could be sent back to its own sender.
        caller, answerer = (hmac.digest(base, end, _HASH) for end in (b"caller", b"answerer"))
        return caller, answerer

    def _proof(self, what: bytes) -> bytes:
        text = what + self._hello + self._nonce
        return hmac.digest(self._key, text, _HASH)[:_PROOF_BYTES]

    def _check(self, what: bytes, proof: bytes) -> None:
        # Not `==`, whose duration would tell how many bytes were right.
        if not hmac.compare_digest(proof, self._proof(what)):
            raise RefusedConnection("it does not know the job's key")


class Caller(_Greeting):
    """The side that connects, and that rank `peer` should answer."""

    def __init__(self, keys: Keys, peer: int) -> None:
        super().__init__(keys)
        self.peer = peer
        self.wants = _NONCE_BYTES + _PROOF_BYTES

    def begin(self) -> bytes:
        """Return the first message."""
        self._key = self._keys.key(self.peer)
        names = _NAMES.pack(_MAGIC, _VERSION, 0, self._keys.rank, self.peer)
        self._hello = names + secrets.token_bytes(_NONCE_BYTES)
        return self._hello + self._proof(b"hello")

    def feed(self, message: bytes) -> bytes:
        """Take the answer, and return its confirmation. Raises RefusedConnection."""
        self._nonce = message[:_NONCE_BYTES]
        self._check(b"answer", message[_NONCE_BYTES:])
        self.wants = 0
        return self._proof(b"confirm")


class Answerer(_Greeting):
    """The side that listens. `peer` is not proved before `wants` is 0."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        self.wants = _HELLO_BYTES + _PROOF_BYTES

    def feed(self, message: bytes) -> bytes:
        """Take a message, and return the answer, which may be empty. Raises RefusedConnection."""
        if self._hello:
            self._check(b"confirm", message)
            self.wants = 0
            return b""
        magic, version, _, peer, dest = _NAMES.unpack_from(message)
        if magic != _MAGIC:
            raise RefusedConnection("it does not speak dlio's protocol")
        if version != _VERSION:
            raise RefusedConnection(
                f"it speaks version {version} of dlio's protocol, this rank {_VERSION}"
            )
        if dest != self._keys.rank:
            raise RefusedConnection(f"it looks for rank {dest}, and this is rank {self._keys.rank}")
        self._key, self._hello = self._keys.key(peer), message[:_HELLO_BYTES]
        self._check(b"hello", message[_HELLO_BYTES:])
        self.peer, self._nonce = peer, secrets.token_bytes(_NONCE_BYTES)
        self.wants = _PROOF_BYTES
        return self._nonce + self._proof(b"answer")
