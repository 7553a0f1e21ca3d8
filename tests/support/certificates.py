"""Certificates for tests of TLS, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificate(NamedTuple):
    cert: Path
    key: Path


class Authority:
    """Signs certificates. `cert` is its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.cert, "-subj", f"/CN={name}")

    def issue(self, stem: str, *names: str, days: int = 2) -> Certificate:
        """A certificate with the names, such as DNS:web or URI:spiffe://shop/web; written to STEM.pem and STEM.key."""
        cert, key, request = (self._folder / f"{stem}.{suffix}" for suffix in ("pem", "key", "csr"))
        alternatives = ["-addext", f"subjectAltName={','.join(names)}"] if names else []
        subject = ["-subj", "/CN=not-a-name"]
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, *subject, *alternatives)
        signed = ["-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", days]
        _openssl("x509", "-req", "-in", request, "-out", cert, "-copy_extensions", "copy", *signed)
        return Certificate(cert, key)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
