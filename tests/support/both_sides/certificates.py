"""A certificate authority for tests, and folders of certificates as a cluster mounts and renews them."""

import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_FILES = ("ca.crt", "tls.crt", "tls.key")
_LIFE = timedelta(days=1)


class Authority:
    """Issues certificates to whoever asks."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("tests")
        builder = _builder(self._name, self._name, self._key.public_key())
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self.certificate = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())

    def mount(self, folder: Path, *uris: str, names: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Path:
        """Make a folder with a new certificate for these URIs and names; or renew it, all files at once, as Kubernetes
        does. Returns the folder.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        alternatives += [_address_or_name(name) for name in names]
        builder = _builder(_name(names[0]), self._name, key.public_key())
        certificate = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False).sign(
            self._key, hashes.SHA256()
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        version = folder / f"..{secrets.token_hex(8)}"
        version.mkdir(parents=True)
        for file, content in zip(_FILES, (_pem(self.certificate), _pem(certificate), private), strict=True):
            (version / file).write_bytes(content)
            if not (folder / file).is_symlink():
                (folder / file).symlink_to(Path("..data") / file)
        link = folder / "..new"
        link.symlink_to(version.name)
        link.replace(folder / "..data")
        return folder


def _address_or_name(text: str) -> x509.GeneralName:
    return x509.IPAddress(IPv4Address(text)) if text[0].isdecimal() else x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _LIFE).not_valid_after(now + _LIFE)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
