"""The kind of the public key in a certificate: some TLS libraries make no handshake with what OpenSSL takes.

    Certificate: tbsCertificate: [version] serial signature issuer validity subject | algorithm, parameters, key
                                                                                    ^ subjectPublicKeyInfo

DER is read as far as this key and no further (RFC 5280, section 4.1). OpenSSL has read the certificate before.
"""

from __future__ import annotations

import ssl
from typing import Final

_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"
_VERSION: Final = 0xA0
"""The tag of the version, which certificates of version 1 leave out."""
_BEFORE_KEY: Final = 5
"""The fields between the version and the key."""
_RSA: Final = bytes.fromhex("2a864886f70d010101")
_ECDSA: Final = bytes.fromhex("2a8648ce3d0201")
_CURVES: Final = {
    bytes.fromhex("2a8648ce3d030107"): "P-256",
    bytes.fromhex("2b81040022"): "P-384",
    bytes.fromhex("2b81040023"): "P-521",
}
_OTHERS: Final = {
    bytes.fromhex("2a864886f70d01010a"): "RSA for PSS alone",
    bytes.fromhex("2b6570"): "Ed25519",
    bytes.fromhex("2b6571"): "Ed448",
}


def key_kind_of(pem: str) -> tuple[str, int]:
    """The kind of key of the first certificate in ``pem``, and the bits of its modulus if it is RSA, else 0.

    ``("ECDSA with P-256", 0)``, ``("RSA", 2048)``, ``("Ed25519", 0)``, ``("an unknown kind", 0)``.
    """
    _, _, behind = pem.partition(_BEGIN)
    body, _, _ = behind.partition(_END)
    try:
        return _kind_in(ssl.PEM_cert_to_DER_cert(f"{_BEGIN}{body}{_END}"))
    except (IndexError, ValueError):
        return "an unknown kind", 0


def _kind_in(der: bytes) -> tuple[str, int]:
    ((_, certificate),) = _parts(der)
    (_, content), *_ = _parts(certificate)
    fields = _parts(content)
    _, key_info = fields[_BEFORE_KEY + (fields[0][0] == _VERSION)]
    (_, algorithm), (_, key) = _parts(key_info)
    (_, name), *parameters = _parts(algorithm)
    if name == _RSA:
        return "RSA", _modulus_bits(key)
    if name == _ECDSA:
        return f"ECDSA with {_CURVES.get(parameters[0][1], 'another curve')}", 0
    return _OTHERS.get(name, "an unknown kind"), 0


def _modulus_bits(key: bytes) -> int:
    ((_, both),) = _parts(key[1:])  # Behind the number of bits that the last byte leaves out.
    (_, modulus), *_ = _parts(both)
    return int.from_bytes(modulus, "big").bit_length()


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """The tag and the content of each element in ``der``. Tags have one byte there, lengths one or more."""
    found = []
    while der:
        begin, size_bytes = 2, der[1]
        if size_bytes & 0x80:
            begin += size_bytes & 0x7F
            size_bytes = int.from_bytes(der[2:begin], "big")
        found.append((der[0], der[begin : begin + size_bytes]))
        der = der[begin + size_bytes :]
    return found
