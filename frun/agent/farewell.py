"""The end of a job in etcd: waits until the other hosts have left, and says which keys go then.

Who has to wait and to clear is the agent's decision.
"""

import contextlib

from frun.errors import WireError
from frun.protocol import wire
from frun.protocol.keys import Keys
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Compare, Delete, Store, read_key


async def until_alone(store: Store, keys: Keys, host: str) -> None:
    """Return when no other host is registered but one that keeps the store and so leaves last."""
    async with Mirror(store, keys.hosts) as mirror:
        while True:
            version = mirror.version
            others = []
            for kv in mirror.items.values():
                with contextlib.suppress(WireError):
                    other = wire.decode_host(kv.value)
                    if other.host != host and not other.keeps_store:
                        others.append(other.host)
            if mirror.revision and not others:
                return
            await mirror.wait_changed(version, None)


async def clear(store: Store, keys: Keys, uid: str) -> None:
    """Delete what the job `uid` leaves; nothing if another job of this id has begun meanwhile.

    Raises StoreUnavailable.
    """
    stored = await read_key(store, keys.spec)
    with contextlib.suppress(WireError):  # another version's is not this job's
        if stored is not None and wire.decode_spec(stored.value).uid == uid:
            unchanged = Compare(key=keys.spec, revision=stored.mod_revision)
            await store.commit([unchanged], clearance(keys))


def clearance(keys: Keys) -> list[Delete]:
    """Return the deletion of everything but the final rank table, which the job's lease ends.

    A host that was cut off finds its job's end there when it is back within that time. Without it that
    host would take missing keys for an etcd that lost its data, and write the job back.
    """
    prefixes = (keys.hosts, keys.reports, keys.incidents, keys.commands)
    single = (keys.spec, keys.leader, keys.news)
    return [
        *(Delete(key=key) for key in single),
        *(Delete(key=prefix, prefix=True) for prefix in prefixes),
    ]
