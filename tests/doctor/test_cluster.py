"""`frun doctor` against etcd that is there, slow to lease, half there, and not there."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable

from frun.clock import SystemClock
from frun.config import RendezvousConfig
from frun.doctor import cluster
from frun.doctor.findings import Finding, Level, failed
from frun.rendezvous.embedded import EmbeddedEtcd
from frun.rendezvous.etcd import EtcdStore
from tests.cli.tools import configure


def config_of(endpoints: str, *flags: str) -> RendezvousConfig:
    """Return where a job of two hosts would meet."""
    return configure(
        "--nnodes=2", "--job-id=j", f"--rdzv-endpoint={endpoints}", "--rdzv-backend=etcd", *flags
    ).rendezvous


async def look(config: RendezvousConfig, *, several_hosts: bool = False) -> list[Finding]:
    """Return all findings."""
    found = cluster.check(config, SystemClock(), several_hosts=several_hosts)
    return [finding async for finding in found]


def text_of(findings: list[Finding], level: Level) -> str:
    """Return the lines of one weight."""
    return "\n".join(f"{each.check}: {each.text}" for each in findings if each.level is level)


def with_etcd(story: Callable[[EmbeddedEtcd], Awaitable[None]]) -> None:
    """Run a story against an etcd of its own."""

    async def run() -> None:
        etcd = EmbeddedEtcd()
        await etcd.start(20.0)
        try:
            async with asyncio.timeout(60):
                await story(etcd)
        finally:
            await etcd.stop()

    asyncio.run(run())


def test_an_etcd_that_answers() -> None:
    """Version, latency, lease and address; a member that is down is a warning; nothing stays behind."""

    async def story(etcd: EmbeddedEtcd) -> None:
        findings = await look(config_of(f"127.0.0.1:9,{etcd.endpoint}"))
        good = text_of(findings, Level.OK)
        assert f"etcd: {etcd.endpoint} is etcd 3." in good
        assert "latency: reads take" in good
        assert "lease: 3 s, as asked for" in good
        assert "address: this host will be 127.0.0.1 (lo)" in good
        assert text_of(findings, Level.WARNING) == "etcd: 127.0.0.1:9: connection refused"
        assert not failed(findings)
        several = await look(config_of(etcd.endpoint), several_hosts=True)
        assert "where no other host reaches it" in text_of(several, Level.FAILURE)
        store = EtcdStore([etcd.endpoint])
        await store.connect(10)
        assert (await store.read("/frun/")).items == {}
        await store.close()

    with_etcd(story)


class SlowToLease(EtcdStore):
    """An etcd whose elections take six seconds, as far as leases tell."""

    async def granted_ttl(self, ttl_s: int) -> int:
        """Return what such an etcd grants."""
        return max(ttl_s, 9)


def test_an_etcd_that_grants_longer_leases_only() -> None:
    """A dead host goes unnoticed for so long, and the line says why."""

    async def story() -> Finding:
        config = config_of("127.0.0.1:9")
        return await cluster.lease(SlowToLease(["127.0.0.1:9"]), config)

    finding = asyncio.run(story())
    assert finding.level is Level.WARNING
    assert "etcd grants 9 s where 3 s are asked for" in finding.text


def test_names_and_endpoints_that_lead_nowhere() -> None:
    """A name that does not resolve is a failure, and so is that no etcd answers."""
    findings = asyncio.run(look(config_of("no.such.name.invalid")))
    bad = text_of(findings, Level.FAILURE)
    assert "name: no.such.name.invalid does not resolve here" in bad
    assert "etcd: no etcd answers" in bad


def test_the_endpoint_of_torchruns_flags() -> None:
    """The host that it names will keep etcd; another one may find nothing there yet."""
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--job-id=j")
    here = configure(*flags, "--rdzv-endpoint=127.0.0.1:29411").rendezvous
    findings = asyncio.run(look(here, several_hosts=True))
    assert "it will keep the job's etcd" in text_of(findings, Level.NOTE)
    assert "any other host would take itself for it" in text_of(findings, Level.WARNING)
    assert asyncio.run(cluster.hosts_endpoint(here))
    assert not failed(findings)


def test_the_command() -> None:
    """One document with findings and time-outs in order; a contradiction ends with 1 and its rule."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "frun", "doctor", "--json"),
            *("--shutdown-timeout=0", "--pause-timeout=30", "--fault-patterns=none.yaml"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["ok"]) == (1, 1, False)
    failures = [each for each in document["findings"] if each["level"] == "failure"]
    assert [each["check"] for each in failures] == ["patterns", "time-outs"]
    assert failures[0]["text"].startswith("--fault-patterns: none.yaml: can not be read: No such")
    seconds = [wait["seconds"] for wait in document["timeouts"]]
    assert seconds == sorted(seconds)
    checks = {each["check"] for each in document["findings"]}
    assert {"etcd", "torch", "devices", "limits", "shared memory", "time-outs"} <= checks
