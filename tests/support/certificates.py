"""Certificates for one test server: an authority, a server for `localhost`, a client named `guest`, and a stranger."""

from __future__ import annotations

from pathlib import Path

from tests.support.servers import run_tool

DAYS = "2"


class Certificates:
    """Files in one folder, made by openssl; the keys are worthless outside the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        self.server = folder / "server.pem"
        self.client = folder / "client.pem"
        self.client_key = folder / "client.key"
        self.stranger_ca = folder / "stranger.pem"

    def make(self) -> None:
        """Make them all; a tenth of a second."""
        self.folder.mkdir()
        self._authority("ca", "holdfast test authority")
        self._authority("stranger", "somebody else")
        self._signed("server", "localhost", "subjectAltName=DNS:localhost")
        self._signed("client", "guest", "extendedKeyUsage=clientAuth")

    def _authority(self, name: str, subject: str) -> None:
        self._openssl(
            *("req", "-x509", "-days", DAYS, "-subj", f"/CN={subject}"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def _signed(self, name: str, subject: str, extension: str) -> None:
        (self.folder / f"{name}.ext").write_text(extension + "\n")
        self._openssl(
            *("req", "-subj", f"/CN={subject}"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        self._openssl(
            *("x509", "-req", "-days", DAYS, "-in", f"{name}.csr", "-extfile", f"{name}.ext"),
            *("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem"),
        )

    def _openssl(self, *arguments: str) -> None:
        run_tool(["openssl", *arguments], cwd=self.folder)
