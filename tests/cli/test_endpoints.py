"""Spelling of addresses, bare IPv6 first of all (R50)."""

import pytest

from frun.endpoints import Endpoint, parse_endpoint, parse_endpoints, parse_host
from frun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", 2379),
        ("a:1", "a", 1),
        ("a.b-c_d:65535", "a.b-c_d", 65535),
        ("10.0.0.1", "10.0.0.1", 2379),
        ("::1", "::1", 2379),
        ("fe80::1%eth0", "fe80::1%eth0", 2379),
        ("[::1]", "::1", 2379),
        ("[::1]:7", "::1", 7),
        ("[fe80::1%va]:2379", "fe80::1%va", 2379),
        ("[::ffff:127.0.0.1]:2379", "::ffff:127.0.0.1", 2379),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", 2379),
        (" a:0 ", "a", 0),
        ("http://a:5", "a", 5),
        ("http://[::1]:5/", "::1", 5),
    ],
)
def test_an_endpoint_is_read(text: str, host: str, port: int) -> None:
    """Every form has a host without brackets and a port, the default one if none is given."""
    endpoint = parse_endpoint(text, default_port=2379, name="--rdzv-endpoint", urls=True)
    assert endpoint == Endpoint(host=host, port=port)
    assert parse_endpoint(str(endpoint), default_port=1, name="again") == endpoint


@pytest.mark.parametrize(
    "text",
    ["", ":1", "a:", "a:x", "a:65536", "a:123456", "[a]:1", "[::1", "[::1]x", "a b", "a/b",
     "ftp://a", "http://", "a:1:2"],
)  # fmt: skip
def test_anything_else_is_refused_by_name(text: str) -> None:
    """The refusal names the flag and the value."""
    with pytest.raises(UsageError, match="--rdzv-endpoint") as caught:
        parse_endpoint(text, default_port=1, name="--rdzv-endpoint", urls=True)
    assert repr(text) in str(caught.value)


def test_a_url_is_for_etcd_only() -> None:
    """c10d and static endpoints have no scheme."""
    with pytest.raises(UsageError, match="is a URL"):
        parse_endpoint("http://a:1", default_port=1, name="--rdzv-endpoint")


def test_several_endpoints() -> None:
    """A comma list; https for all of them or none."""
    found = parse_endpoints("https://a:1,https://[::1]", default_port=2, name="x")
    assert found == (
        Endpoint(host="a", port=1, tls=True),
        Endpoint(host="::1", port=2, tls=True),
    )
    for bad in (",", "a,http://,b", "https://a,b"):
        with pytest.raises(UsageError):
            parse_endpoints(bad, default_port=2, name="x")


@pytest.mark.parametrize(("text", "host"), [("[::1]", "::1"), ("::1", "::1"), (" a.b ", "a.b")])
def test_a_host_loses_its_brackets(text: str, host: str) -> None:
    """MASTER_ADDR never has brackets."""
    assert parse_host(text, name="--master-addr") == host
