"""Flags of commands that ask engines and routers over TLS: authorities to trust, own certificate, name to expect.

If one of the flags is given, no call is in the clear. The files are read for each call, because Secrets are renewed in
place. A probe that runs every few seconds imports this file, so it imports next to nothing.
"""

from __future__ import annotations

import argparse
import ssl
from contextlib import suppress
from dataclasses import dataclass

from pdcluster_protocol.pem_files import client_context, no_password, words_of


class Unusable(Exception):
    """The files cannot be used. The message names the flag and the cure."""


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """The flags' values, empty where a flag is not given."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    name: str = ""

    @property
    def is_given(self) -> bool:
        """Whether any flag is given. A call in the clear would be a mistake then."""
        return bool(self.ca or self.cert or self.key or self.name)

    def context(self) -> ssl.SSLContext:
        """A client's context, from the files as they are now.

        Raises:
            Unusable: A file cannot be read, or certificate and key are no pair.
        """
        context = client_context()
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            else:
                context.load_default_certs()
        except OSError as error:  # ssl.SSLError is one.
            raise Unusable(f"--tls-ca {self.ca}: {words_of(error)}: name a file of certificates in PEM") from error
        self._show_with(context)
        return context

    def any_context(self) -> ssl.SSLContext:
        """A client's context that takes any certificate, and shows ours if its files can be used."""
        context = client_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with suppress(Unusable):
            self._show_with(context)
        return context

    def _show_with(self, context: ssl.SSLContext) -> None:
        if not self.cert and not self.key:
            return
        both = f"--tls-cert {self.cert or 'not given'} and --tls-key {self.key or 'not given'}"
        if not (self.cert and self.key):
            raise Unusable(f"{both}: give both files, or neither")
        try:
            context.load_cert_chain(self.cert, self.key, password=no_password)
        except OSError as error:
            raise Unusable(f"{both}: {words_of(error)}: give a certificate and its key in PEM, no password") from error

    def told_of(self, error: ssl.SSLError) -> str:
        """Why TLS failed, and the cure."""
        trusted = f"one of --tls-ca {self.ca}" if self.ca else "one that this system trusts (or --tls-ca FILE)"
        expected = f"--tls-name {self.name}" if self.name else "the host that is asked (--tls-name NAME: another one)"
        if isinstance(error, ssl.SSLCertVerificationError):
            said = error.verify_message.rstrip(".")
            return f"its certificate is not trusted ({said}): it must be signed by {trusted}, and name {expected}"
        return f"no TLS agreement ({words_of(error)}): it may speak plain HTTP, or {self.told_of_refusal}"

    @property
    def told_of_refusal(self) -> str:
        """The likely cause if the other end refuses us."""
        if not self.cert:
            return "it may ask for a certificate: give --tls-cert and --tls-key"
        return (
            f"it may refuse --tls-cert {self.cert}: that must not have expired, must allow client authentication, and "
            "must be signed by an authority that the other end trusts"
        )


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``tls_flags_of`` reads."""
    add = parser.add_argument
    told = "PEM file with the authorities to trust, or the certificate itself; https then (default: the system's)"
    add("--tls-ca", metavar="FILE", type=_file, help=told)
    add("--tls-cert", metavar="FILE", type=_file, help="PEM file with the certificate to show; https then")
    add("--tls-key", metavar="FILE", type=_file, help="PEM file with its private key, without a password")
    told = "name that the certificate of the other end must have; https then (default: the host that is asked)"
    add("--tls-name", metavar="NAME", type=_name, help=told)


def tls_flags_of(given: argparse.Namespace) -> TlsFlags:
    return TlsFlags(given.tls_ca or "", given.tls_cert or "", given.tls_key or "", given.tls_name or "")


def _file(word: str) -> str:
    """``word``, if it is not empty. An empty word, as from a shell's empty variable, would turn TLS off."""
    if not word:
        raise argparse.ArgumentTypeError("it is empty: name a file, or leave the flag out")
    return word


def _name(word: str) -> str:
    """``word``, if a connection can ask for it."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no DNS name or address") from error
    return word
