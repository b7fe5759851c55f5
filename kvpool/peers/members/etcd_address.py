"""Address of etcd and how it is reached: values, for the configuration too. Loads no HTTP library; any thread."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from kvpool.errors import InvalidArgument

SERVERS_MAX = 16
PREFIX_BYTES_MAX = 256
DEFAULT_PREFIX = "kvpool/members"
_EXPECTED = "expected etcd:http://HOST:PORT, or several separated by commas, and then /PREFIX"


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Place of the members: servers as `http://HOST:PORT`, and the prefix of the keys, which ends with a slash."""

    servers: tuple[str, ...]
    prefix: str


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Files of certificates, in PEM; empty: the system's authorities, and no certificate of this node."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


def parse_etcd(text: str) -> EtcdAddress:
    """The address in `etcd:URL[,URL…][/PREFIX]`. Raises InvalidArgument."""
    scheme, _, rest = text.partition(":")
    urls = [_split(url) for url in rest.split(",")]
    if any(url is not None and "@" in url.netloc for url in urls):
        raise InvalidArgument("a source of members has a password in its URL: use certificates, and remove it")
    servers = [f"{url.scheme}://{url.netloc}" for url in urls if url is not None]
    paths = [url.path.strip("/") for url in urls if url is not None]
    if scheme != "etcd" or len(servers) != len(urls) or len(urls) > SERVERS_MAX or any(paths[:-1]):
        raise InvalidArgument(f"{text!r} is no source of members, {_EXPECTED}")
    if len(paths[-1].encode()) > PREFIX_BYTES_MAX:
        raise InvalidArgument(f"{text!r} has a prefix of more than {PREFIX_BYTES_MAX} bytes")
    return EtcdAddress(tuple(servers), f"{paths[-1] or DEFAULT_PREFIX}/")


def _split(url: str) -> SplitResult | None:
    """The parts of a server's URL; None where it is none."""
    try:
        found = urlsplit(url)
        is_server = found.scheme in ("http", "https") and bool(found.hostname) and bool(found.port)
    except ValueError:
        return None
    return found if is_server and not found.query and not found.fragment else None
